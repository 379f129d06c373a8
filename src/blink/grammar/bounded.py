# SPDX-License-Identifier: Apache-2.0
"""Texts of a language with a bounded number of characters, without a state for each number.

A text may come back to a state again and again, as within the path of a URI. There blocks of such turns are counted,
not their characters: each counts as if it was full. So texts are never too long; of the longest, some may not be
written.
"""

from __future__ import annotations

from blink.grammar.errors import GrammarTooLargeError
from blink.grammar.expression import EMPTY, Block, Escapes, Expression, Paths, Regular
from blink.grammar.language import NO_TEXTS, Language, make_language, one_char

_MAX_STATES = 8000
_BLOCKS = (48, 8)
_EXACT = 48  # up to here each character counts


def bounded(language: Language, least: int, most: int, escapes: Escapes) -> Expression:
    """Return the texts of a language, as they are written inside of a JSON string, that have a number of characters.

    Raises:
        GrammarTooLargeError: it takes too many states.
    """
    return _Bounded(language, least, most, escapes).expression()


class _Bounded:
    def __init__(self, language: Language, least: int, most: int, escapes: Escapes) -> None:
        self._language = language
        self._escapes = escapes
        self._least = least
        self._most = most
        self._turns = {state: _turns_of(language, state) for state in range(language.num_states)}
        self._blocks: dict[tuple[int, int], Block] = {}
        self._numbers: dict[tuple[int, int], int] = {(0, 0): 0}
        self._left = [(0, 0)]
        self._edges: list[tuple[int, Expression, int]] = []

    def expression(self) -> Expression:
        while self._left:
            state, count = self._left.pop()
            self._expand(state, count)
        ends = [
            number
            for (state, count), number in self._numbers.items()
            if self._language.finals[state] and count >= self._least
        ]
        return Paths(tuple(self._edges), frozenset(ends), EMPTY)

    def _place(self, state: int, count: int) -> int:
        """Return the number of a state behind so many characters."""
        key = (state, min(count, self._most))
        if key not in self._numbers:
            if len(self._numbers) >= _MAX_STATES:
                raise GrammarTooLargeError("a pattern or a format together with these lengths needs too many states")
            self._numbers[key] = len(self._numbers)
            self._left.append(key)
        return self._numbers[key]

    def _expand(self, state: int, count: int) -> None:
        here = self._numbers[state, count]
        turns = self._turns[state]
        # A block begins at a multiple of its size, so that few numbers of characters are told apart.
        size = next((size for size in _BLOCKS if _rounded(count, size) + size <= self._most), None)
        takes_blocks = count >= max(self._least, _EXACT) and turns is not None and size is not None
        if takes_blocks and size is not None:
            self._edges.append((here, self._block(state, size), self._place(state, _rounded(count, size) + size)))
        if count >= self._most:
            return
        for end, ranges in self._language.moves[state].items():
            if not takes_blocks or turns is None or end not in turns:
                # By its first byte it is told from the block's characters.
                char = Regular(
                    one_char(ranges), in_string=True, escapes=Escapes.NONE if takes_blocks else self._escapes
                )
                self._edges.append((here, char, self._place(end, count + 1)))

    def _block(self, state: int, size: int) -> Block:
        """Return turns that come back to a state after at most so many characters."""
        known = self._blocks.get((state, size))
        if known is None:
            texts = _turn_texts(self._language, state, self._turns[state] or frozenset(), size)
            known = self._blocks[state, size] = Block(Regular(texts, in_string=True, escapes=self._escapes))
        return known


def _rounded(count: int, size: int) -> int:
    return (count + size - 1) // size * size


def _turns_of(language: Language, state: int) -> frozenset[int] | None:
    """Return the states from which every way leads back to a state before it ends or leads elsewhere; None: none do."""
    closed = {other for other in range(language.num_states) if not language.finals[other]} - {state}
    while True:
        left = {other for other in closed if all(end in closed or end == state for end in language.moves[other])}
        if left == closed:
            break
        closed = left
    found = frozenset(end for end in language.moves[state] if end in closed or end == state)
    return frozenset({*closed, state}) if found else None


def _turn_texts(language: Language, state: int, inside: frozenset[int], size: int) -> Language:
    numbers = {(state, 0): 0}
    left = [(state, 0)]
    edges: list[tuple[int, int, int, int]] = []
    while left:
        one, count = key = left.pop()
        if count == size:
            continue
        for end, ranges in language.moves[one].items():
            if end not in inside:
                continue
            after = (end, count + 1)
            if after not in numbers:
                numbers[after] = len(numbers)
                left.append(after)
            edges += [(numbers[key], low, high, numbers[after]) for low, high in ranges]
    finals = [int(one == state and count > 0) for one, count in numbers]
    return make_language(finals, edges) if edges else NO_TEXTS
