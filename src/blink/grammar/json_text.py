# SPDX-License-Identifier: Apache-2.0
"""JSON's lexical parts: strings, numbers, any value; and texts as they are written inside of strings."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

from blink.grammar.expression import (
    EMPTY,
    Call,
    Chars,
    Choice,
    Expression,
    Repeat,
    Series,
    Text,
    chars,
    choice,
    complement,
    optional,
    series,
    subtract,
)
from blink.grammar.regex import ANY_CHAR

OBJECT_RULE, ARRAY_RULE = "any object", "any array"
# More digits would be more than a double keeps.
_MAX_DIGITS = 15
_NO_RAW = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}

_DIGIT, _NONZERO = chars((0x30, 0x39)), chars((0x31, 0x39))
NATURAL = choice(["0", series(_NONZERO, Repeat(_DIGIT, 0, _MAX_DIGITS - 1))])
INTEGER = series(optional(Text(b"-")), NATURAL)
FRACTION = series(".", Repeat(_DIGIT, 1, _MAX_DIGITS))
_EXPONENT = series(chars((0x45, 0x45), (0x65, 0x65)), optional(chars((0x2B, 0x2B), (0x2D, 0x2D))), Repeat(_DIGIT, 1, 2))
NUMBER = series(INTEGER, optional(FRACTION), optional(_EXPONENT))
BOOLEAN = choice(["true", "false"])


def inside_string(expression: Expression) -> Expression:
    """Return texts as they are written between a JSON string's quotes."""
    if isinstance(expression, Text):
        return Text(json.dumps(expression.data.decode(), ensure_ascii=False)[1:-1].encode())
    if isinstance(expression, Chars):
        return _escape_chars(expression)
    if isinstance(expression, Repeat):
        return Repeat(inside_string(expression.part), expression.least, expression.most)
    if isinstance(expression, Series):
        return Series(tuple(inside_string(part) for part in expression.parts))
    assert isinstance(expression, Choice)
    return Choice(tuple(inside_string(option) for option in expression.options))


def _escape_chars(expression: Chars) -> Expression:
    raw = Chars(subtract(expression.ranges, _NO_RAW))
    hidden = subtract(expression.ranges, complement(_NO_RAW))
    codes = [code for low, high in hidden for code in range(low, high + 1)]
    # Of any character, control characters without a short form are left out: no text needs them.
    if len(codes) > len(_SHORT_ESCAPES):
        codes = [code for code in codes if code in _SHORT_ESCAPES]
    escapes = [_SHORT_ESCAPES.get(code, f"\\u{code:04x}") for code in codes]
    return choice([raw, *escapes]) if escapes else raw


STRING_CHAR = inside_string(ANY_CHAR)


def string(least: int = 0, most: int | None = None) -> Expression:
    """Return JSON strings with a number of characters."""
    return series('"', Repeat(STRING_CHAR, least, most), '"')


STRING = string()


class Layout:
    """Where JSON may have a space."""

    def __init__(self, *, allows_spaces: bool) -> None:
        space = optional(Text(b" ")) if allows_spaces else EMPTY
        self.comma = series(",", space)
        self.colon = series(":", space)
        self._allows_spaces = allows_spaces

    def literal(self, value: Any) -> Expression:
        """Return one JSON value."""
        if isinstance(value, dict):
            members = [series(self.literal(key), self.colon, self.literal(item)) for key, item in value.items()]
            return self.enclosed("{", members, "}")
        if isinstance(value, list):
            return self.enclosed("[", [self.literal(item) for item in value], "]")
        return Text(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())

    def enclosed(self, start: str, parts: Iterable[Expression], end: str) -> Expression:
        """Return parts with commas between them."""
        found: list[Expression] = []
        for part in parts:
            found += [self.comma, part] if found else [part]
        return series(start, *found, end)

    def list_of(self, item: Expression, least: int, most: int | None) -> Expression:
        """Return a number of items with commas between them."""
        if most == 0:
            return EMPTY
        rest = Repeat(series(self.comma, item), max(least - 1, 0), None if most is None else most - 1)
        filled = series(item, rest)
        return filled if least > 0 else optional(filled)

    @functools.cached_property
    def any_value(self) -> Expression:
        """Return any JSON value; containers are calls, so that nesting takes no states."""
        return choice([STRING, NUMBER, BOOLEAN, "null", Call(OBJECT_RULE), Call(ARRAY_RULE)])

    def any_rules(self) -> dict[str, Expression]:
        """Return the rules that any_value calls."""
        member = series(STRING, self.colon, self.any_value)
        return {
            OBJECT_RULE: series("{", self.list_of(member, 0, None), "}"),
            ARRAY_RULE: series("[", self.list_of(self.any_value, 0, None), "]"),
        }
