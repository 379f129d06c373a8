# SPDX-License-Identifier: Apache-2.0
"""What a text may look like: the algebra that all kinds of grammars become before they are automata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blink.grammar.language import Language

CodePoints = tuple[tuple[int, int], ...]  # ranges, ascending, never adjacent, both ends included
MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


class Escapes(Enum):
    """The characters that may be escaped inside of a JSON string."""

    NONE = 0
    NEEDED = 1  # those that cannot stand for themselves, each in one way
    ALL = 2


class Mark(IntEnum):  # csrc/automaton/machine.h
    """What a part means for items that have to differ."""

    ITEM = 1  # its texts do from those before it
    FIRST_ITEM = 2  # there are none before it
    SEPARATOR = 3  # another item follows


class Expression:
    """A set of texts."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Text(Expression):
    """These bytes."""

    data: bytes


EMPTY = Text(b"")


@dataclass(frozen=True, slots=True, eq=False)
class Chars(Expression):
    """One character of a set."""

    ranges: CodePoints


@dataclass(frozen=True, slots=True, eq=False)
class Escape(Expression):
    """One character of a set as an escape of a JSON string."""

    ranges: CodePoints
    escapes: Escapes = Escapes.ALL


@dataclass(frozen=True, slots=True, eq=False)
class Series(Expression):
    """One part after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Expression):
    """One of the options."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(Expression):
    """A part several times; without a limit if `most` is None."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Members(Expression):
    """Items in order with a separator between any two; those that are not required may be missing.

    Behind them come any number of `others`. `least` and `most` bound how many there are in all; `behind` follows if
    there is one.
    """

    items: tuple[tuple[Expression, bool], ...]  # and whether each is required
    separator: Expression
    others: Expression | None = None
    least: int = 0
    most: int | None = None
    behind: Expression = EMPTY


@dataclass(frozen=True, slots=True, eq=False)
class Paths(Expression):
    """Items on a way through states, from state 0 to one of `ends`, with a separator between any two.

    `behind` follows if there is one.
    """

    edges: tuple[tuple[int, Expression, int], ...]
    ends: frozenset[int]
    separator: Expression
    behind: Expression = EMPTY


@dataclass(frozen=True, slots=True, eq=False)
class Call(Expression):
    """A text of the rule of that name; is_greedy: as long as it can be, where what follows could begin alike."""

    rule: str
    is_greedy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Block(Expression):
    """A part that is a rule of its own wherever it stands, as long as it can be."""

    part: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Marked(Expression):
    """A part with a meaning for items that have to differ. Those of no other array may be between an array's."""

    part: Expression
    mark: Mark


@dataclass(frozen=True, slots=True, eq=False)
class Regular(Expression):
    """The texts of a language; inside of a JSON string, in the ways in which they can be written there."""

    language: Language
    in_string: bool = False
    escapes: Escapes = Escapes.ALL


@dataclass(frozen=True, slots=True, eq=False)
class Both(Expression):
    """Texts of two expressions at once or, if it excludes the other, of the first alone; only inside of patterns."""

    one: Expression
    other: Expression
    excludes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Until(Expression):
    """Any text that may end, or go on with the trigger, which it does not hold before, and then with `rest`.

    Behind that comes such a text again or, if it `is_once`, its end. A special token may begin with the trigger, and in
    places inside of it.
    """

    trigger: bytes
    rest: Expression
    is_once: bool = False
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Without(Expression):
    """Any text, special tokens too, that holds none of the words."""

    words: tuple[bytes, ...]


NEVER = Choice(())


def series(*parts: Expression | bytes | str) -> Expression:
    """Return parts one after the other; texts may stand for themselves."""
    return Series(tuple(_as_expression(part) for part in parts))


def choice(options: Iterable[Expression | bytes | str]) -> Expression:
    """Return one of the options."""
    found = tuple(_as_expression(option) for option in options)
    return found[0] if len(found) == 1 else Choice(found)


def optional(part: Expression) -> Expression:
    """Return the part, or nothing."""
    return Repeat(part, 0, 1)


def chars(*ranges: tuple[int, int]) -> Chars:
    """Return one character of these ranges."""
    return Chars(union(ranges))


def union(ranges: Iterable[tuple[int, int]]) -> CodePoints:
    """Return ranges in order, joined where they touch, without surrogates."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return subtract(tuple(joined), (_SURROGATES,))


def subtract(ranges: CodePoints, others: Iterable[tuple[int, int]]) -> CodePoints:
    """Return what of the ranges is in none of the others."""
    left = list(ranges)
    for low, high in others:
        parts: list[tuple[int, int]] = []
        for start, end in left:
            if end < low or start > high:
                parts.append((start, end))
                continue
            parts += [(a, b) for a, b in ((start, low - 1), (high + 1, end)) if a <= b]
        left = parts
    return tuple(left)


def complement(ranges: CodePoints) -> CodePoints:
    """Return all other characters."""
    return subtract(union([(0, MAX_CODE_POINT)]), ranges)


def _as_expression(part: Expression | bytes | str) -> Expression:
    if isinstance(part, Expression):
        return part
    return Text(part if isinstance(part, bytes) else part.encode())
