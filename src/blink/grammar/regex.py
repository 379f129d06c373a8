# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as expressions: what JSON Schema's patterns and vLLM's `regex` have in common.

What dialects read differently, such as letters beyond ASCII for \\w, is matched neither by a class nor by its opposite.
"""

from __future__ import annotations

import re

from blink.grammar.assertions import Edge, Look, resolve_assertions
from blink.grammar.errors import GrammarError
from blink.grammar.expression import (
    MAX_CODE_POINT,
    Chars,
    Choice,
    CodePoints,
    Expression,
    Repeat,
    Series,
    Text,
    complement,
    union,
)
from blink.grammar.unicode import category

MAX_PATTERN_CHARS = 8192
_MAX_COUNT = 100_000
_MAX_DEPTH = 40

_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((0x09, 0x0D), (0x20, 0x20))
_BEYOND_ASCII = (0x80, MAX_CODE_POINT)
# What some dialect counts to a class besides.
_PERHAPS: dict[str, CodePoints] = {"d": (_BEYOND_ASCII,), "w": (_BEYOND_ASCII,), "s": ((0x1C, 0x1F), _BEYOND_ASCII)}
_CLASSES: dict[str, CodePoints] = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0}
_NEWLINE = ((0x0A, 0x0A),)
_LINE_ENDS = union((*_NEWLINE, (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029)))


def parse_regex(pattern: str, *, searches: bool = False, is_outer: bool = False) -> Expression:
    """Return the texts that a pattern matches: whole ones or, if it `searches`, those that have a match inside.

    is_outer: the texts that it matches in any dialect, not those that it matches in all.

    Raises:
        GrammarError: it is malformed, or has something beyond regular expressions.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"a pattern may have {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    try:
        return resolve_assertions(_Parser(pattern, is_outer).parse(), searches=searches)
    except GrammarError as error:
        raise GrammarError(f"pattern {pattern[:80]!r}: {error.message}") from None


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, is_outer: bool) -> None:
        self._text = pattern
        self._is_outer = is_outer
        self._at = 0
        self._depth = 0

    def parse(self) -> Expression:
        found = self._alternatives()
        if self._at < len(self._text):
            raise GrammarError(f"unbalanced parenthesis at {self._at}")
        return found

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) * found
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise GrammarError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError("it is nested too deeply")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            parts.append(self._quantified())
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _quantified(self) -> Expression:
        part = self._atom()
        while (counts := self._quantifier()) is not None:
            least, most = counts
            if most is not None and least > most:
                raise GrammarError(f"{{{least},{most}}} allows nothing")
            if max(least, most or 0) > _MAX_COUNT:
                raise GrammarError(f"a count may be {_MAX_COUNT} at most")
            if isinstance(part, Edge | Look):
                raise GrammarError("nothing to repeat")
            part = Repeat(part, least, most)
            if not self._take("?"):  # lazy: the same texts
                self._take("+")
        return part

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        end = self._text.find("}", self._at)
        if not self._peek("{") or end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        digits = least + most
        if not (digits.isdecimal() and digits.isascii()):
            return None  # a brace that stands for itself
        if max(len(least), len(most)) > 9:
            raise GrammarError(f"a count may be {_MAX_COUNT} at most")
        self._at = end + 1
        return int(least or 0), int(most) if most else None if comma else int(least)

    def _atom(self) -> Expression:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._set())
        if char == ".":
            return Chars(complement(_NEWLINE if self._is_outer else _LINE_ENDS))
        if char in "^$":
            return Edge(char == "^", may_precede_newline=self._is_outer and char == "$")
        if char in "*+?":
            raise GrammarError(f"nothing to repeat at {self._at - 1}")
        if char == "\\":
            return self._escape()
        return Text(_encode(char))

    def _group(self) -> Expression:
        if self._take("?"):
            if self._take("P<") or (self._peek("<") and not self._peek("<=") and not self._peek("<!")):
                end = self._text.find(">", self._at)
                if end < 0:
                    raise GrammarError("a group's name has no end")
                self._at = end + 1
            elif self._peek("=") or self._peek("!"):
                return self._look()
            elif not self._take(":"):
                raise GrammarError("look-behinds, flags and conditions are not supported")
        found = self._alternatives()
        if not self._take(")"):
            raise GrammarError("a parenthesis is not closed")
        return found

    def _look(self) -> Expression:
        excludes = self._next() == "!"
        self._is_outer ^= excludes
        found = self._alternatives()
        self._is_outer ^= excludes
        if not self._take(")"):
            raise GrammarError("a parenthesis is not closed")
        return Look(found, excludes)

    def _escape(self) -> Expression:
        char = self._next()
        if char in "AZz":
            return Edge(char == "A")
        if char in "bBGK" or (char.isdigit() and char != "0") or char in "kX":
            raise GrammarError(f"\\{char} is not supported")
        self._at -= 1
        return Chars(self._escaped())

    def _escaped(self) -> CodePoints:
        """Return what an escape stands for, the backslash being read."""
        char = self._next()
        name = char.lower()
        if name in _CLASSES:
            takes_all = self._is_outer == (char == name)
            found = union((*_CLASSES[name], *_PERHAPS[name])) if takes_all else _CLASSES[name]
            return found if char == name else complement(found)
        if char in "xu":
            return self._coded(2 if char == "x" else 4)
        if char in "pP":
            return self._category(char == "P")
        if char == "c" or (char.isalpha() and char not in _CONTROLS):
            raise GrammarError(f"\\{char} is not supported")
        code = _CONTROLS.get(char, ord(char))
        return ((code, code),)

    def _category(self, is_opposite: bool) -> CodePoints:
        end = self._text.find("}", self._at)
        if not self._take("{") or end < 0:
            raise GrammarError("\\p needs a category, as in \\p{L}")
        name = self._text[self._at : end]
        self._at = end + 1
        found = category(name)
        return complement(found) if is_opposite else found

    def _coded(self, num_digits: int) -> CodePoints:
        start, end = self._at, self._at + num_digits
        if self._take("{"):
            start, end = self._at, max(self._text.find("}", self._at), self._at)
            self._at = end + 1
        else:
            self._at = end
        digits = self._text[start:end]
        if not re.fullmatch("[0-9A-Fa-f]{1,8}", digits):
            raise GrammarError("an escape has no hexadecimal number")
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and (second := re.match(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})", self._text[end:])):
            code = 0x10000 + ((code - 0xD800) << 10) + int(second[1], 16) - 0xDC00
            self._at += 6
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF or end > len(self._text):
            raise GrammarError("an escape is of no character")
        return ((code, code),)

    def _set(self) -> CodePoints:
        is_negated = self._take("^")
        self._is_outer ^= is_negated
        ranges: list[tuple[int, int]] = []
        if self._peek("]"):
            raise GrammarError("an empty set of characters; write \\] for a bracket")
        while not self._peek("]"):
            low = self._set_item()
            if len(low) == 1 and low[0][0] == low[0][1] and self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._set_item()
                if len(high) != 1 or high[0][1] < low[0][0]:
                    raise GrammarError("a range of characters is reversed")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        self._at += 1
        self._is_outer ^= is_negated
        found = union(ranges)
        return complement(found) if is_negated else found

    def _set_item(self) -> CodePoints:
        char = self._next()
        if char == "[" and self._peek(":"):
            raise GrammarError("[[:names:]] are not supported")
        if char == "\\":
            if self._take("b"):
                return ((8, 8),)
            return self._escaped()
        _encode(char)
        return ((ord(char), ord(char)),)


def _encode(char: str) -> bytes:
    try:
        return char.encode()
    except UnicodeEncodeError:
        raise GrammarError("it holds a lone surrogate") from None
