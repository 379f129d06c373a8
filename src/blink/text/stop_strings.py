# SPDX-License-Identifier: Apache-2.0
"""Find stop strings in growing text, over token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Pass text through until a stop string is complete; hold back what may be the beginning of one.

    The match that is complete first wins, the longest of several that end together: so the result does not depend
    on how the text is cut into tokens.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain now; after a match, `matched` is set and nothing more may be pushed."""
        text = self._held + text
        match = self._first_match(text)
        if match is None:
            keep = self._undecided(text)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep]
        end, start, self.matched = match
        self._held = ""
        return text[: end if self._include else start]

    def finish(self) -> str:
        """Return the text held back when the sequence ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches, default=None)

    def _undecided(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
