# SPDX-License-Identifier: Apache-2.0
"""Texts in which special tokens may stand."""

from __future__ import annotations

import re

from blink.grammar.expression import Expression, Text, optional, series
from blink.region.constants import CONSTANTS

SPECIAL_MARK = bytes([CONSTANTS["special_token_byte"]])
_PLACES = re.compile(r"(?<=.)(?=</?[|\uff5c\w]|\[/?[A-Z_]|\uff5c\w)", re.DOTALL)  # where a token may begin


def literal(text: str) -> Expression:
    """Return a text, in which the first characters and each that looks like a mark may begin a special token."""
    if not text:
        return series()
    parts: list[Expression | str] = []
    for part in _PLACES.split(text):
        parts += [optional(Text(SPECIAL_MARK)), part]
    return series(*parts)


def inner_places(text: str) -> tuple[int, ...]:
    """Return the places in a text's bytes, other than its beginning, where a special token may begin."""
    return tuple(len(text[: found.start()].encode()) for found in _PLACES.finditer(text))
