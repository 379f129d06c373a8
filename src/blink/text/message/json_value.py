# SPDX-License-Identifier: Apache-2.0
"""Find the end of a JSON value in growing text. Knows strings and brackets only: what it passes may be malformed."""

from __future__ import annotations

import re
from enum import Enum

_OF_STRUCTURE = re.compile(r'["{}\[\]<]')  # where a mark begins, the value is malformed
_OF_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[\s,:}\]\[{\"]")
_SCALAR_STARTS = frozenset("-0123456789tfn")
_CLOSERS = {"{": "}", "[": "]"}


class Status(Enum):
    """How far something that grows has come."""

    OPEN = 0
    DONE = 1
    BROKEN = 2


class JsonValue:
    """Follow one value from its first character on."""

    __slots__ = ("_closers", "_in_string", "_is_escaped", "first", "status")

    def __init__(self) -> None:
        self.status = Status.OPEN
        self.first = ""  # the value's first character, which tells its kind
        self._closers: list[str] = []
        self._in_string = self._is_escaped = False

    def feed(self, text: str, place: int) -> int:
        """Take the text from `place` on; return where the value ends, or the text does."""
        if not self.first:
            self.first = text[place]
            if self.first in _CLOSERS or self.first == '"':
                self._take(self.first)
                place += 1
            elif self.first not in _SCALAR_STARTS:
                self.status = Status.BROKEN
                return place
        if self.first not in _CLOSERS and self.first != '"':
            return self._feed_scalar(text, place)
        while place < len(text) and self.status is Status.OPEN:
            place = self._feed_string(text, place) if self._in_string else self._feed_structure(text, place)
        return place

    def _feed_scalar(self, text: str, place: int) -> int:
        found = _AFTER_SCALAR.search(text, place)
        if found is None:
            return len(text)
        self.status = Status.DONE
        return found.start()

    def _feed_string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        found = _OF_STRING.search(text, place)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            if not self._closers:
                self.status = Status.DONE
        return found.end()

    def _feed_structure(self, text: str, place: int) -> int:
        found = _OF_STRUCTURE.search(text, place)
        if found is None:
            return len(text)
        self._take(found[0])
        return found.end() if self.status is not Status.BROKEN else found.start()

    def _take(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character == "<" or self._closers.pop() != character:
            self.status = Status.BROKEN
        elif not self._closers:
            self.status = Status.DONE
