# SPDX-License-Identifier: Apache-2.0
"""Find stop strings in growing text, over token borders, in time that is linear in the text (Aho-Corasick)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_CHARACTER_BITS = 21  # Unicode's code points
# The largest automaton takes about 3 MiB; the sequences of one request, and requests that stop alike, share theirs.
_KEPT_AUTOMATA = 8


class StopAutomaton:
    """A trie of the stop strings: state 0 is its root, a state's `depth` the number of characters that lead to it.

    `edges` leads from (state, character) to the next state, `fallback` from a state to the longest other state that
    the text read so far ends with, `stop` to the index of the longest stop string that it ends with, or -1.
    """

    __slots__ = ("depth", "edges", "fallback", "firsts", "stop", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.firsts = frozenset(stop[0] for stop in stops)
        self.edges: dict[int, int] = {}
        self.depth = array("l", [0])
        self.stop = array("l", [-1])
        characters, parents = self._grow()
        self.fallback = array("l", bytes(self.depth.itemsize * len(self.depth)))
        # In order of depth: what a state falls back to is less deep and complete before it.
        for state in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            parent = parents[state]
            if parent:
                self.fallback[state] = self.advance(self.fallback[parent], characters[state])
            if self.stop[state] < 0:
                self.stop[state] = self.stop[self.fallback[state]]

    def _grow(self) -> tuple[array[int], array[int]]:
        """Add every stop string to the trie; return each state's last character and its parent."""
        characters, parents = array("l", [0]), array("l", [0])
        for index, stop in enumerate(self.stops):
            state = 0
            for character in map(ord, stop):
                key = state << _CHARACTER_BITS | character
                if key not in self.edges:
                    self.edges[key] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self.stop.append(-1)
                    characters.append(character)
                    parents.append(state)
                state = self.edges[key]
            if self.stop[state] < 0:
                self.stop[state] = index
        return characters, parents

    def advance(self, state: int, character: int) -> int:
        """Return the state after one more character."""
        while True:
            found = self.edges.get(state << _CHARACTER_BITS | character)
            if found is not None:
                return found
            if not state:
                return 0
            state = self.fallback[state]


@lru_cache(maxsize=_KEPT_AUTOMATA)
def build_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of these stop strings."""
    return StopAutomaton(stops)


class StopMatcher:
    """Pass text through until a stop string is complete; hold back what may be the beginning of one.

    The match that is complete first wins, the longest of several that end together: so the result does not depend
    on how the text is cut into tokens.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._automaton = build_automaton(tuple(stops))
        self._include = include
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain now; after a match, `matched` is set and nothing more may be pushed."""
        automaton = self._automaton
        if not self._state and automaton.firsts.isdisjoint(text):
            return text
        state = self._state
        for place, character in enumerate(map(ord, text), len(self._held) + 1):
            state = automaton.advance(state, character)
            if automaton.stop[state] >= 0:
                self.matched = automaton.stops[automaton.stop[state]]
                whole, self._held = self._held + text, ""
                return whole[: place if self._include else place - len(self.matched)]
        self._state = state
        text = self._held + text
        certain = len(text) - automaton.depth[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text held back when the sequence ends without a match."""
        held, self._held, self._state = self._held, "", 0
        return held
