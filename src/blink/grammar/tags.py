# SPDX-License-Identifier: Apache-2.0
"""Texts with tagged JSON inside, as expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blink.grammar.errors import GrammarError
from blink.grammar.expression import Expression, Repeat, Text, Until, choice, optional, series
from blink.region.constants import CONSTANTS
from blink.structured_outputs import StructuralTag, StructuredOutputsParams

SPECIAL_MARK = bytes([CONSTANTS["special_token_byte"]])


def compile_tags(tag: StructuralTag, compile_schema: Callable[[Any], Expression]) -> Expression:
    """Return the texts that a structural tag describes.

    Raises:
        GrammarError: a tag cannot be compiled.
    """
    if tag.trigger:
        # What begins each tag has been read when its rest is called.
        rests = [
            series(each.begin[len(tag.trigger) :], compile_schema(each.schema), literal(each.end)) for each in tag.tags
        ]
        if tag.max_tags == 1:
            return Until(tag.trigger.encode(), choice(rests), is_once=True)
        if tag.max_tags is not None:
            raise GrammarError("max_tags with a trigger may be 1 only")
        return Until(tag.trigger.encode(), choice(rests))
    tags = choice([series(literal(each.begin), compile_schema(each.schema), literal(each.end)) for each in tag.tags])
    most = None if tag.max_tags is None else tag.max_tags - 1
    rest = Repeat(series(literal(tag.separator), tags), 0, most)
    return series(literal(tag.prefix), tags, rest, literal(tag.suffix))


def place_behind_reasoning(params: StructuredOutputsParams, form: Expression) -> Expression:
    """Return the form with the reasoning before it that a request allows."""
    if not params.reasoning_end:
        return form
    behind = Until(params.reasoning_end.encode(), series(Repeat(Text(b"\n"), 0, 2), form), is_once=True)
    return choice([series(literal(params.reasoning_start), behind), form]) if params.reasoning_start else behind


def literal(text: str) -> Expression:
    """Return a text that may begin with a special token."""
    return series(optional(Text(SPECIAL_MARK)), text) if text else series()
