# SPDX-License-Identifier: Apache-2.0
"""Parse the bytes of a body into plain values of Python, and refuse what is not JSON, or too large or too deep.

So no later step meets a lone surrogate, a number that is none, or a depth at which a parser or an encoder gives up.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from blink.errors import BadRequestError
from blink.text.json_weight import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_ITEMS,
    JsonWeight,
    may_be_deep,
    weigh_json,
)

_MAX_EXPLAINED_BYTES = 8 << 10
_MAX_DIGITS = 300  # of an integer that a float can hold
_MAX_NAME_CHARS = 64
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put before a text


def parse_body(data: bytes | bytearray, more_items: int) -> Any:
    """Return the value that a body holds; `more_items` are what it may hold beyond the usual.

    Raises:
        BadRequestError: it is no JSON, holds too much, or is nested too deeply; the message says where.
    """
    if len(data) > MAX_JSON_CONTAINERS or may_be_deep(data):  # each container takes a byte
        _check_weight(weigh_json(data), data, MAX_JSON_ITEMS + more_items)
    if data.startswith(_MARK):
        data = data[len(_MARK) :]
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _explain(data, error) from None


def _check_weight(weight: JsonWeight, data: bytes | bytearray, max_items: int) -> None:
    if weight.depth > 1 + MAX_JSON_DEPTH:  # the body itself is one
        name = weight.name_in(data)
        raise BadRequestError(f"{name or 'The body'} must be nested at most {MAX_JSON_DEPTH} deep.", name)
    if weight.containers > MAX_JSON_CONTAINERS or weight.items > max_items:
        raise BadRequestError(
            f"The body holds too much: at most {MAX_JSON_CONTAINERS} lists and objects with {max_items} members."
        )


def _explain(data: bytes | bytearray, error: orjson.JSONDecodeError) -> BadRequestError:
    """Say what is wrong; of what Python's own parser takes, such as NaN and lone surrogates, by the field's name."""
    try:
        text = data.decode()
    except UnicodeDecodeError as fault:
        return BadRequestError(f"{fault.start}: the body is not UTF-8")
    if len(data) <= _MAX_EXPLAINED_BYTES:
        try:
            value = json.loads(text, parse_int=_parse_integer)
        except ValueError:
            value = None
        for name, member in value.items() if isinstance(value, dict) else ():
            if fault := _fault_of(name) or _fault_of(member):
                shown = name.encode(errors="replace").decode()[:_MAX_NAME_CHARS]
                return BadRequestError(f"{shown} holds {fault}: that is no JSON.", shown)
    return BadRequestError(f"{error.pos}: JSON decode error")


def _parse_integer(digits: str) -> float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _fault_of(value: Any) -> str:
    """Return what of a value JSON cannot hold; nothing if it can hold all."""
    if isinstance(value, str):
        return "half of a surrogate pair" if any("\ud800" <= letter <= "\udfff" for letter in value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else "NaN, or a number too large for a float"
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_fault_of, inner)), "")
