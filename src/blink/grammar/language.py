# SPDX-License-Identifier: Apache-2.0
"""Regular languages: sets of texts as minimal automata over code points, with the operations of sets."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache

from blink.grammar.budget import spend
from blink.grammar.errors import GrammarTooLargeError
from blink.grammar.expression import MAX_CODE_POINT, CodePoints, union
from blink.region.native import lib

_AND, _OR, _MINUS = range(3)  # csrc/automaton/language.h
Moves = Mapping[int, CodePoints]  # by the state that they lead to


class Language:
    """A set of texts. Equal sets have equal words (csrc/automaton/language.h)."""

    __slots__ = ("__dict__", "words")

    def __init__(self, words: bytes) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Language) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def __and__(self, other: Language) -> Language:
        return _combine(self, other, _AND)

    def __or__(self, other: Language) -> Language:
        return _combine(self, other, _OR)

    def __sub__(self, other: Language) -> Language:
        return _combine(self, other, _MINUS)

    @property
    def num_states(self) -> int:
        return int.from_bytes(self.words[:4], "little")

    @property
    def is_empty(self) -> bool:
        """Say whether there is no text."""
        return self.num_states == 0

    @cached_property
    def finals(self) -> tuple[bool, ...]:
        """Return by state whether a text may end there."""
        return tuple(map(bool, self._numbers[2 : 2 + self.num_states]))

    @cached_property
    def moves(self) -> tuple[Moves, ...]:
        """Return by state where characters lead to."""
        found: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(self.num_states)]
        for start, low, high, end in self._edges:
            found[start].setdefault(end, []).append((low, high))
        return tuple({end: tuple(ranges) for end, ranges in each.items()} for each in found)

    def matches(self, text: str) -> bool:
        """Say whether a text is one of them."""
        if self.is_empty:
            return False
        state = 0
        for char in text:
            lows, edges = self._table[state]
            place = bisect_right(lows, ord(char)) - 1
            if place < 0 or edges[place][1] < ord(char):
                return False
            state = edges[place][2]
        return self.finals[state]

    @cached_property
    def lengths(self) -> tuple[int, int | None]:
        """Return the least and the most characters of a text; None: no limit. Not of an empty language."""
        return self._shortest(), self._longest()

    def count(self, limit: int) -> int:
        """Return how many texts there are, or a number above a limit."""
        if self.is_empty:
            return 0
        if self.lengths[1] is None:
            return limit + 1
        found, ways = 0, {0: 1}
        while ways and found <= limit:
            found += sum(number for state, number in ways.items() if self.finals[state])
            after: dict[int, int] = {}
            for state, number in ways.items():
                for end, ranges in self.moves[state].items():
                    size = number * sum(high - low + 1 for low, high in ranges)
                    after[end] = min(after.get(end, 0) + size, limit + 1)
            ways = after
        return found

    @cached_property
    def _numbers(self) -> array[int]:
        return array("I", self.words)

    @cached_property
    def _edges(self) -> list[tuple[int, int, int, int]]:
        numbers = self._numbers[2 + self.num_states :].tolist()
        return list(zip(numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=True))

    @cached_property
    def _table(self) -> list[tuple[list[int], list[tuple[int, int, int]]]]:
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_states)]
        for start, low, high, end in self._edges:
            rows[start].append((low, high, end))
        return [([low for low, _, _ in row], row) for row in rows]

    def _shortest(self) -> int:
        states, length, seen = {0}, 0, {0}
        while not any(self.finals[state] for state in states):
            states = {end for state in states for end in self.moves[state]} - seen
            seen |= states
            length += 1
        return length

    def _longest(self) -> int | None:
        """Return the longest way to a final state; every state leads to one, so a circle has no limit."""
        longest: dict[int, int] = {}
        left: list[tuple[int, bool]] = [(0, False)]
        on_way: set[int] = set()
        while left:
            state, is_done = left.pop()
            if is_done:
                on_way.discard(state)
                ends = [longest[end] + 1 for end in self.moves[state]]
                longest[state] = max([0, *ends])
            elif state not in longest:
                on_way.add(state)
                left.append((state, True))
                if any(end in on_way for end in self.moves[state]):
                    return None
                left += [(end, False) for end in self.moves[state] if end not in longest]
        return longest[0]


def _take(size: int) -> Language:
    if size < 0:
        raise GrammarTooLargeError("a pattern, or what holds together with it, needs too many states")
    spend(12 + lib.blink_language_work() // 1200)
    out = ctypes.create_string_buffer(4 * size)
    lib.blink_language_take(out)
    return Language(out.raw)


def take_built(build: Callable[[], int]) -> Language:
    """Return what a call of the native library has built."""
    return _take(build())


@lru_cache(maxsize=2048)
def _combine(one: Language, other: Language, operation: int) -> Language:
    return _take(lib.blink_language_combine(one.words, other.words, operation))


def make_language(finals: list[int], edges: list[tuple[int, int, int, int]]) -> Language:
    """Return the language of a deterministic automaton that begins in state 0; edges are (from, low, high, to)."""
    return _pack(finals, sorted(edges)) & ANY_TEXTS


def _pack(finals: list[int], edges: Iterable[tuple[int, int, int, int]]) -> Language:
    numbers = [number for edge in edges for number in edge]
    return Language(array("I", [len(finals), len(numbers) // 4, *finals, *numbers]).tobytes())


NO_TEXTS = _pack([], [])
ANY_TEXTS = _pack([1], [(0, low, high, 0) for low, high in union([(0, MAX_CODE_POINT)])])


def one_char(ranges: CodePoints) -> Language:
    """Return the texts of one character of a class."""
    return make_language([0, 1], [(0, low, high, 1) for low, high in ranges])


def texts_of_lengths(least: int, most: int | None) -> Language:
    """Return all texts of a number of characters."""
    last = least if most is None else most
    ranges = union([(0, MAX_CODE_POINT)])
    edges = [(at, low, high, at + 1) for at in range(last) for low, high in ranges]
    if most is None:
        edges += [(last, low, high, last) for low, high in ranges]
    return _pack([int(at >= least) for at in range(last + 1)], edges)


def texts(values: Iterable[str]) -> Language:
    """Return the language of some texts."""
    known = sorted(set(values))
    if not known:
        return NO_TEXTS
    rows: list[dict[int, int]] = [{}]
    finals = [0]
    for value in known:
        state = 0
        for char in value:
            after = rows[state].get(ord(char))
            if after is None:
                after = rows[state][ord(char)] = len(rows)
                rows.append({})
                finals.append(0)
            state = after
        finals[state] = 1
    edges = [(at, code, code, end) for at, row in enumerate(rows) for code, end in row.items()]
    return make_language(finals, edges)
