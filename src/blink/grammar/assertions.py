# SPDX-License-Identifier: Apache-2.0
"""Anchors and look-aheads of regular expressions, resolved: what is left has none."""

from __future__ import annotations

from collections.abc import Iterator

from blink.grammar.errors import GrammarError
from blink.grammar.expression import EMPTY, NEVER, Both, Chars, Choice, Expression, Repeat, Series, Text, complement

ANY_CHAR = Chars(complement(()))


class Edge(Expression):
    """The beginning or the end of a text; may_precede_newline: also before a newline that is the last character."""

    __slots__ = ("is_start", "may_precede_newline")

    def __init__(self, is_start: bool, *, may_precede_newline: bool = False) -> None:
        self.is_start = is_start
        self.may_precede_newline = may_precede_newline


class Look(Expression):
    """What must follow, or must not if it excludes that."""

    __slots__ = ("ahead", "excludes")

    def __init__(self, ahead: Expression, excludes: bool) -> None:
        self.ahead = ahead
        self.excludes = excludes


def resolve_assertions(pattern: Expression, *, searches: bool) -> Expression:
    """Return the texts that a pattern matches: whole ones or, if it `searches`, those that have a match inside.

    Raises:
        GrammarError: an assertion is repeated.
    """
    around = Repeat(ANY_CHAR, 0, None) if searches else EMPTY
    at_start = _resolve(pattern, around, at_start=True)
    if not searches or _must_start(pattern):
        return at_start
    if not _has_assertion(pattern, starts_only=True):
        return Series((around, at_start))
    return Choice((at_start, Series((ANY_CHAR, around, _resolve(pattern, around, at_start=False)))))


def _resolve(part: Expression, behind: Expression, *, at_start: bool) -> Expression:
    """Return a part and what follows it, with its assertions resolved; at_start: nothing stands before it."""
    if not _has_assertion(part):
        return behind if _is_empty(part) else part if _is_empty(behind) else Series((part, behind))
    if isinstance(part, Edge):
        if part.is_start:
            return behind if at_start else NEVER
        if part.may_precede_newline:
            return Both(behind, Repeat(Text(b"\n"), 0, 1), excludes=False)
        return EMPTY if _may_be_empty(behind) else NEVER
    if isinstance(part, Look):
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
        if isinstance(first, Edge | Look):
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
    return isinstance(part, Edge) and part.is_start


def _inside(part: Expression) -> tuple[Expression, ...]:
    if isinstance(part, Series):
        return part.parts
    if isinstance(part, Choice):
        return part.options
    if isinstance(part, Repeat):
        return (part.part,)
    return (part.ahead,) if isinstance(part, Look) else ()


def _has_assertion(part: Expression, *, starts_only: bool = False) -> bool:
    if isinstance(part, Edge):
        return part.is_start or not starts_only
    if isinstance(part, Look) and not starts_only:
        return True
    return any(_has_assertion(each, starts_only=starts_only) for each in _inside(part))


def _all_inside(part: Expression) -> Iterator[Expression]:
    yield part
    for each in _inside(part):
        yield from _all_inside(each)


def _is_look_or_start(part: Expression) -> bool:
    return isinstance(part, Look) or (isinstance(part, Edge) and part.is_start)


def _without_ends(part: Expression) -> Expression:
    """Return a part that does not come to the text's end."""
    if isinstance(part, Edge):
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
