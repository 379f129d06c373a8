# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as expressions: what JSON Schema's patterns and vLLM's `regex` have in common.

Classes such as \\w are those of ASCII, and their opposites leave out what any dialect might count to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from blink.grammar.errors import GrammarError
from blink.grammar.expression import (
    EMPTY,
    MAX_CODE_POINT,
    NEVER,
    Both,
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


class _Look(Expression):
    """A look-ahead; none is left when parse_regex() returns."""

    __slots__ = ("ahead", "excludes")

    def __init__(self, ahead: Expression, excludes: bool) -> None:
        self.ahead = ahead
        self.excludes = excludes


def parse_regex(pattern: str, *, searches: bool = False) -> Expression:
    """Return the texts that a pattern matches: whole ones or, if it `searches`, those that have a match inside.

    Raises:
        GrammarError: it is malformed, or has something beyond regular expressions.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"a pattern may have {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    try:
        found = _Parser(pattern).parse()
        around = Repeat(ANY_CHAR, 0, None) if searches else EMPTY
        at_start = _resolve(found, around, at_start=True)
        if not searches or _must_start(found):
            return at_start
        if not _has_assertion(found, starts_only=True):
            return Series((around, at_start))
        return Choice((at_start, Series((ANY_CHAR, around, _resolve(found, around, at_start=False)))))
    except GrammarError as error:
        raise GrammarError(f"pattern {pattern[:80]!r}: {error.message}") from None


def _resolve(part: Expression, behind: Expression, *, at_start: bool) -> Expression:
    """Return a part and what follows it, with its assertions resolved; at_start: nothing stands before it."""
    if not _has_assertion(part):
        return behind if _is_empty(part) else part if _is_empty(behind) else Series((part, behind))
    if isinstance(part, _Edge):
        if part.is_start:
            return behind if at_start else NEVER
        return EMPTY if _may_be_empty(behind) else NEVER
    if isinstance(part, _Look):
        ahead = _resolve(part.ahead, Repeat(ANY_CHAR, 0, None), at_start=at_start)
        return Both(behind, ahead, part.excludes)
    if isinstance(part, Choice):
        return Choice(tuple(_resolve(option, behind, at_start=at_start) for option in part.options))
    if isinstance(part, Series):
        return _resolve_series(part.parts, behind, at_start=at_start)
    assert isinstance(part, Repeat)
    if part.most == 0:
        return behind
    if any(_is_look_or_start(each) for each in _all_inside(part)) and part.most != 1:
        raise GrammarError("an assertion that is no $ cannot be repeated")
    # The end is reached in the last turn alone.
    last = _resolve(part.part, behind, at_start=at_start)
    if part.most != 1:
        before = Repeat(_without_ends(part.part), max(part.least - 1, 0), None if part.most is None else part.most - 1)
        last = Series((before, last))
    return last if part.least > 0 else Choice((behind, last))


def _resolve_series(parts: tuple[Expression, ...], behind: Expression, *, at_start: bool) -> Expression:
    if not parts:
        return behind
    first, rest = parts[0], parts[1:]
    if isinstance(first, Series):
        return _resolve_series((*first.parts, *rest), behind, at_start=at_start)
    if _has_assertion(first):
        if isinstance(first, _Edge | _Look):
            return _resolve(first, _resolve_series(rest, behind, at_start=at_start), at_start=at_start)
        if isinstance(first, Repeat):
            return _resolve(first, _resolve_series(rest, behind, at_start=at_start), at_start=at_start)
        options = first.options if isinstance(first, Choice) else (first,)
        return Choice(tuple(_resolve_series((option, *rest), behind, at_start=at_start) for option in options))
    after = _resolve_series(rest, behind, at_start=False)
    if _is_empty(after):
        return first
    moved = Series((first, after))
    if at_start and _may_be_empty(first) and any(_has_assertion(part, starts_only=True) for part in rest):
        return Choice((_resolve_series(rest, behind, at_start=True), moved))
    return moved


def _must_start(part: Expression) -> bool:
    """Say whether every match begins where the text does."""
    if isinstance(part, Series):
        return bool(part.parts) and _must_start(part.parts[0])
    if isinstance(part, Choice):
        return all(_must_start(option) for option in part.options)
    return isinstance(part, _Edge) and part.is_start


def _inside(part: Expression) -> tuple[Expression, ...]:
    if isinstance(part, Series):
        return part.parts
    if isinstance(part, Choice):
        return part.options
    if isinstance(part, Repeat):
        return (part.part,)
    return (part.ahead,) if isinstance(part, _Look) else ()


def _has_assertion(part: Expression, *, starts_only: bool = False) -> bool:
    if isinstance(part, _Edge):
        return part.is_start or not starts_only
    if isinstance(part, _Look) and not starts_only:
        return True
    return any(_has_assertion(each, starts_only=starts_only) for each in _inside(part))


def _all_inside(part: Expression) -> Iterator[Expression]:
    yield part
    for each in _inside(part):
        yield from _all_inside(each)


def _is_look_or_start(part: Expression) -> bool:
    return isinstance(part, _Look) or (isinstance(part, _Edge) and part.is_start)


def _without_ends(part: Expression) -> Expression:
    """Return a part that does not come to the text's end."""
    if isinstance(part, _Edge):
        return NEVER
    if isinstance(part, Series):
        return Series(tuple(_without_ends(each) for each in part.parts))
    if isinstance(part, Choice):
        return Choice(tuple(_without_ends(each) for each in part.options))
    return Repeat(_without_ends(part.part), part.least, part.most) if isinstance(part, Repeat) else part


def _is_empty(part: Expression) -> bool:
    return (isinstance(part, Text) and not part.data) or (isinstance(part, Series) and not part.parts)


def _may_be_empty(part: Expression) -> bool:
    if isinstance(part, Text):
        return not part.data
    if isinstance(part, Chars):
        return False
    if isinstance(part, Repeat):
        return part.least == 0 or _may_be_empty(part.part)
    if isinstance(part, Series):
        return all(_may_be_empty(each) for each in part.parts)
    if isinstance(part, Choice):
        return any(_may_be_empty(each) for each in part.options)
    assert isinstance(part, Both)
    return _may_be_empty(part.one) and _may_be_empty(part.other) != part.excludes


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
            if isinstance(part, _Edge | _Look):
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
        found = self._alternatives()
        if not self._take(")"):
            raise GrammarError("a parenthesis is not closed")
        return _Look(found, excludes)

    def _escape(self) -> Expression:
        char = self._next()
        if char in "AZz":
            return _Edge(char == "A")
        if char in "bBGK" or (char.isdigit() and char != "0") or char in "kX":
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
