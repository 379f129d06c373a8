# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as expressions: what JSON Schema's patterns and vLLM's `regex` have in common.

Classes such as \\w are those of ASCII, and their opposites leave out what any dialect might count to them.
"""

from __future__ import annotations

from blink.grammar.errors import GrammarError
from blink.grammar.expression import (
    EMPTY,
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

MAX_PATTERN_CHARS = 8192
_MAX_COUNT = 100_000
_MAX_DEPTH = 40

_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((0x09, 0x0D), (0x20, 0x20))
_BEYOND_ASCII = ((0x80, MAX_CODE_POINT),)
_CLASSES: dict[str, CodePoints] = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0}
_NEWLINES = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ANY_CHAR = Chars(complement(()))


class _Edge(Expression):
    """An anchor; none is left when parse_regex() returns."""

    __slots__ = ("is_start",)

    def __init__(self, is_start: bool) -> None:
        self.is_start = is_start


def parse_regex(pattern: str, *, searches: bool = False) -> Expression:
    """Return the texts that a pattern matches: whole ones or, if it `searches`, those that have a match inside.

    Raises:
        GrammarError: it is malformed, or has something beyond regular expressions.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"a pattern may have {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    try:
        return _resolve_anchors(_Parser(pattern).parse(), searches)
    except GrammarError as error:
        raise GrammarError(f"pattern {pattern[:80]!r}: {error.message}") from None


def _resolve_anchors(expression: Expression, searches: bool) -> Expression:
    """Replace anchors at both ends, and put any text where there is none."""
    around = Repeat(ANY_CHAR, 0, None) if searches else EMPTY
    options: list[Expression] = []
    for option in _options(expression):
        parts = list(option.parts) if isinstance(option, Series) else [option]
        is_closed = [bool(parts) and isinstance(parts[at], _Edge) for at in (0, -1)]
        while parts and isinstance(parts[0], _Edge) and parts[0].is_start:
            parts.pop(0)
        while parts and isinstance(parts[-1], _Edge) and not parts[-1].is_start:
            parts.pop()
        if len(parts) == 1 and isinstance(parts[0], Choice) and not any(is_closed):
            options.append(_resolve_anchors(parts[0], searches))
            continue
        if any(_has_anchor(part) for part in parts):
            raise GrammarError("^ and $ are supported at its ends only")
        before, behind = (EMPTY if closed else around for closed in is_closed)
        options.append(Series((before, *parts, behind)))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _options(expression: Expression) -> tuple[Expression, ...]:
    return expression.options if isinstance(expression, Choice) else (expression,)


def _has_anchor(expression: Expression) -> bool:
    if isinstance(expression, Series):
        return any(_has_anchor(part) for part in expression.parts)
    if isinstance(expression, Choice):
        return any(_has_anchor(option) for option in expression.options)
    if isinstance(expression, Repeat):
        return _has_anchor(expression.part)
    return isinstance(expression, _Edge)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
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
            if isinstance(part, _Edge):
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
            return Chars(complement(_NEWLINES))
        if char in "^$":
            return _Edge(char == "^")
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
            elif not self._take(":"):
                raise GrammarError("lookarounds, flags and conditions are not supported")
        found = self._alternatives()
        if not self._take(")"):
            raise GrammarError("a parenthesis is not closed")
        return found

    def _escape(self) -> Expression:
        char = self._next()
        if char in "AZz":
            return _Edge(char == "A")
        if char in "bBGK" or (char.isdigit() and char != "0") or char in "kpPX":
            raise GrammarError(f"\\{char} is not supported")
        self._at -= 1
        return Chars(self._escaped(is_negated=False))

    def _escaped(self, *, is_negated: bool) -> CodePoints:
        """Return what an escape stands for, the backslash being read; is_negated: in a set of what is not meant."""
        char = self._next()
        if char in _CLASSES:
            return union((*_CLASSES[char], *(_BEYOND_ASCII if is_negated else ())))
        if char.lower() in _CLASSES:
            others = complement(union((*_CLASSES[char.lower()], *_BEYOND_ASCII)))
            return complement(_CLASSES[char.lower()]) if is_negated else others
        if char in "xu":
            return self._coded(2 if char == "x" else 4)
        if char == "c" or (char.isalpha() and char not in _CONTROLS):
            raise GrammarError(f"\\{char} is not supported")
        code = _CONTROLS.get(char, ord(char))
        return ((code, code),)

    def _coded(self, num_digits: int) -> CodePoints:
        start, end = self._at, self._at + num_digits
        if self._take("{"):
            start, end = self._at, max(self._text.find("}", self._at), self._at)
            self._at = end + 1
        else:
            self._at = end
        try:
            code = int(self._text[start:end], 16)
        except ValueError:
            raise GrammarError("an escape has no hexadecimal number") from None
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF or end > len(self._text):
            raise GrammarError("an escape is of no character")
        return ((code, code),)

    def _set(self) -> CodePoints:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        if self._peek("]"):
            raise GrammarError("an empty set of characters; write \\] for a bracket")
        while not self._peek("]"):
            low = self._set_item(is_negated)
            if len(low) == 1 and low[0][0] == low[0][1] and self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._set_item(is_negated)
                if len(high) != 1 or high[0][1] < low[0][0]:
                    raise GrammarError("a range of characters is reversed")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        self._at += 1
        found = union(ranges)
        return complement(found) if is_negated else found

    def _set_item(self, is_negated: bool) -> CodePoints:
        char = self._next()
        if char == "[" and self._peek(":"):
            raise GrammarError("[[:names:]] are not supported")
        if char == "\\":
            if self._take("b"):
                return ((8, 8),)
            return self._escaped(is_negated=is_negated)
        _encode(char)
        return ((ord(char), ord(char)),)


def _encode(char: str) -> bytes:
    try:
        return char.encode()
    except UnicodeEncodeError:
        raise GrammarError("it holds a lone surrogate") from None


def char_bounds(expression: Expression) -> tuple[int, int | None]:
    """Return the least and the most characters of a pattern's texts; None: no limit."""
    if isinstance(expression, Text):
        length = len(expression.data.decode())
        return length, length
    if isinstance(expression, Chars):
        return 1, 1
    if isinstance(expression, Repeat):
        least, most = char_bounds(expression.part)
        limit = None if most is None or expression.most is None else most * expression.most
        return least * expression.least, 0 if most == 0 else limit
    parts = expression.parts if isinstance(expression, Series) else _options(expression)
    bounds = [char_bounds(part) for part in parts]
    mosts = [most for _, most in bounds]
    combine, choose = (sum, sum) if isinstance(expression, Series) else (min, max)
    if not bounds:
        return 0, 0
    return combine(least for least, _ in bounds), None if None in mosts else choose(m for m in mosts if m is not None)
