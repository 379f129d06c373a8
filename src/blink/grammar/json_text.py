# SPDX-License-Identifier: Apache-2.0
"""JSON's lexical parts: strings, numbers, spaces, any value. All of them that are long or many are rules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from blink.grammar.escapes import BEYOND_ASCII, RAW_ASCII
from blink.grammar.expression import (
    EMPTY,
    Call,
    Chars,
    Escape,
    Escapes,
    Expression,
    Mark,
    Marked,
    Regular,
    Repeat,
    Text,
    chars,
    choice,
    complement,
    optional,
    series,
)
from blink.grammar.language import texts
from blink.grammar.numbers import all_numbers

OBJECT_RULE, ARRAY_RULE, STRING_RULE, NUMBER_RULE = "any object", "any array", "any string", "any number"
_BEYOND_RULE = "any character beyond ASCII"
_ESCAPE_RULES = {Escapes.ALL: "any escape", Escapes.NEEDED: "any needed escape"}
_SPACE_RULE, _COMMA_RULE, _COLON_RULE = "space", "comma", "colon"
# So much space a text may have in one place: enough for indented lines, and the end of endless blanks.
_MAX_SPACES = 80
_NEEDS_ESCAPES = frozenset("\"\\/&'<>\x7f")

BOOLEAN = choice(["true", "false"])
_ANY_CHAR = complement(())
# Of many characters in a row each has a state of its own: what is longer than a byte is a rule.
_COUNTED_CHARS = {
    each: choice([Chars(RAW_ASCII), Call(rule), Call(_BEYOND_RULE)]) for each, rule in _ESCAPE_RULES.items()
}
_SPACES = chars((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20))


def any_string(escapes: Escapes) -> Expression:
    """Return any string with its quotes."""
    char = choice([Chars(RAW_ASCII), Call(_ESCAPE_RULES[escapes]), Chars(BEYOND_ASCII)])
    return series('"', Repeat(char, 0, None), '"')


def any_chars(least: int, most: int | None, escapes: Escapes) -> Expression:
    """Return a number of any characters as they are written inside of a JSON string."""
    return Repeat(_COUNTED_CHARS[escapes], least, most)


def string_literal(text: str) -> Expression:
    """Return one JSON string, in each way in which what is not plain in ASCII can be written."""
    if text.isascii() and text.isprintable() and not _NEEDS_ESCAPES & set(text):
        return Text(f'"{text}"'.encode())
    return series('"', Regular(texts([text]), in_string=True), '"')


class Layout:
    """Where JSON may have spaces: between any two of its tokens, or nowhere."""

    def __init__(self, *, allows_spaces: bool) -> None:
        self._allows_spaces = allows_spaces
        # The first space is no call: many tokens begin with one.
        self.space = optional(series(_SPACES, optional(Call(_SPACE_RULE, is_greedy=True)))) if allows_spaces else EMPTY
        comma = Call(_COMMA_RULE, is_greedy=True) if allows_spaces else Text(b",")
        self.comma = series(self.space, comma)
        self.limiting_comma = series(self.space, Marked(comma, Mark.SEPARATOR))  # of items that have to differ
        self.colon = Call(_COLON_RULE, is_greedy=True) if allows_spaces else Text(b":")
        self.any_value = choice(
            [Call(STRING_RULE), Call(NUMBER_RULE), BOOLEAN, "null", Call(OBJECT_RULE), Call(ARRAY_RULE)]
        )

    def literal(self, value: Any) -> Expression:
        """Return one JSON value."""
        if isinstance(value, dict):
            members = [series(string_literal(key), self.colon, self.literal(item)) for key, item in value.items()]
            return self.enclosed("{", members, "}")
        if isinstance(value, list):
            return self.enclosed("[", [self.literal(item) for item in value], "]")
        if isinstance(value, str):
            return string_literal(value)
        return Text(json.dumps(value, allow_nan=False).encode())

    def enclosed(self, start: str, parts: Iterable[Expression], end: str) -> Expression:
        """Return parts with commas between them."""
        found: list[Expression] = []
        for part in parts:
            found += [self.comma, part] if found else [self.space, part]
        return series(start, *found, self.space, end)

    def list_of(self, item: Expression, least: int, most: int | None) -> Expression:
        """Return a number of items with commas between them, and what space may be behind them."""
        if most == 0:
            return EMPTY
        rest = Repeat(series(self.comma, item), max(least - 1, 0), None if most is None else most - 1)
        filled = series(item, rest, self.space)
        return filled if least > 0 else optional(filled)

    def rules(self) -> dict[str, Expression]:
        """Return the rules of all this."""
        member = series(Call(STRING_RULE), self.colon, self.any_value)
        found: dict[str, Expression] = {
            STRING_RULE: any_string(Escapes.ALL),
            NUMBER_RULE: all_numbers().expression(),
            **{rule: Escape(_ANY_CHAR, each) for each, rule in _ESCAPE_RULES.items()},
            _BEYOND_RULE: Chars(BEYOND_ASCII),
            OBJECT_RULE: series("{", self.space, self.list_of(member, 0, None), "}"),
            ARRAY_RULE: series("[", self.space, self.list_of(self.any_value, 0, None), "]"),
        }
        if self._allows_spaces:
            found[_SPACE_RULE] = Repeat(_SPACES, 1, _MAX_SPACES - 1)
            found[_COMMA_RULE] = series(",", self.space)
            found[_COLON_RULE] = series(self.space, ":", self.space)
        return found
