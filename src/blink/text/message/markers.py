# SPDX-License-Identifier: Apache-2.0
"""Find markers in growing text."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Markers:
    """Some strings that are looked for together; the longest wins where several begin."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = sorted(texts, key=len, reverse=True)
        self._firsts = frozenset(text[0] for text in texts)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def search(self, text: str, place: int = 0) -> tuple[int, int] | None:
        """Return the interval of the first marker from a place on, None if there is none."""
        found = self._pattern.search(text, place)
        return found.span() if found else None

    def match(self, text: str) -> int:
        """Return the length of the marker that the text begins with, 0 if it begins with none."""
        found = self._pattern.match(text)
        return found.end() if found else 0

    def may_begin(self, text: str) -> bool:
        """Say whether the text is the beginning of a marker."""
        return any(marker.startswith(text) for marker in self._texts)

    def may_grow(self, text: str) -> bool:
        """Say whether the text is the beginning of a longer marker."""
        return any(len(marker) > len(text) and marker.startswith(text) for marker in self._texts)

    def cannot_begin_in(self, text: str) -> bool:
        """Say whether no marker begins anywhere in a text."""
        return self._firsts.isdisjoint(text)

    def certain(self, text: str, place: int = 0) -> int:
        """Return up to where no character from a place on can be part of a marker, whatever follows."""
        longest = min(len(text) - place, max((len(marker) - 1 for marker in self._texts), default=0))
        for length in range(longest, 0, -1):
            if self.may_begin(text[-length:]):
                return len(text) - length
        return len(text)
