# SPDX-License-Identifier: Apache-2.0
"""The ways in which characters can be written inside of a JSON string (RFC 8259, section 7), as small graphs."""

from __future__ import annotations

from functools import lru_cache

from blink.grammar.expression import CodePoints, Escapes, complement, subtract
from blink.grammar.utf8 import byte_sequences

Edge = tuple[int, int, int, int]  # from, low, high, to
_START, _END = 0, 1
_NO_RAW = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SHORT = {0x22: '"', 0x5C: "\\", 0x2F: "/", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
# Characters that encoders write as \\uXXXX: all but what is plain in ASCII; those of HTML (& ' < >) are, too.
_PLAIN = ((0x20, 0x25), (0x28, 0x2E), (0x30, 0x3B), (0x3D, 0x3D), (0x3F, 0x7E))
# A class with all of these, as "." has them, may have any of its characters escaped.
_WIDE = ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A), (0xE9, 0xE9), (0x4E00, 0x4E00))


class Template:
    """A graph from node 0 to node 1 for the characters of a class."""

    def __init__(self) -> None:
        self.edges: list[Edge] = []
        self.num_nodes = 2
        self._backslash: int | None = None
        self._marked: int | None = None
        self._free: dict[tuple[int, int], int] = {}

    def node(self) -> int:
        """Return a new node."""
        self.num_nodes += 1
        return self.num_nodes - 1

    def add_raw(self, ranges: CodePoints) -> None:
        """Add characters as they are."""
        for sequence in byte_sequences(ranges):
            at = _START
            for place, (low, high) in enumerate(sequence, 1):
                after = _END if place == len(sequence) else self.node()
                self.edges.append((at, low, high, after))
                at = after

    def add_short(self, code: int) -> None:
        """Add the escape of two characters that some have."""
        letter = ord(_SHORT[code])
        self.edges.append((self._slash(), letter, letter, _END))

    def add_coded(self, low: int, high: int) -> None:
        """Add \\uXXXX of a range: two of them beyond the first plane."""
        if low < 0x10000:
            self._hex(self._code(), low, min(high, 0xFFFF), 4, _END)
        first, last = max(low, 0x10000) - 0x10000, high - 0x10000
        while first <= last:
            # Whole rows of the second half together, else a part of one row.
            row, column = divmod(first, 0x400)
            is_whole = column == 0 and (last + 1) // 0x400 > row
            until = (last + 1) // 0x400 * 0x400 - 1 if is_whole else min(last, row * 0x400 + 0x3FF)
            middle = self.node()
            self._hex(self._code(), 0xD800 + row, 0xD800 + until // 0x400, 4, middle)
            second = self._behind(middle)
            self._hex(second, 0xDC00 + column, 0xDC00 + until % 0x400, 4, _END)
            first = until + 1

    def add_text(self, text: str) -> None:
        """Add a text alone."""
        at = _START
        for place, letter in enumerate(text, 1):
            after = _END if place == len(text) else self.node()
            self.edges.append((at, ord(letter), ord(letter), after))
            at = after

    def _slash(self) -> int:
        if self._backslash is None:
            self._backslash = self.node()
            self.edges.append((_START, 0x5C, 0x5C, self._backslash))
        return self._backslash

    def _code(self) -> int:
        if self._marked is None:
            self._marked = self.node()
            self.edges.append((self._slash(), 0x75, 0x75, self._marked))
        return self._marked

    def _behind(self, start: int) -> int:
        slash, marked = self.node(), self.node()
        self.edges += [(start, 0x5C, 0x5C, slash), (slash, 0x75, 0x75, marked)]
        return marked

    def _hex(self, start: int, low: int, high: int, count: int, end: int) -> None:
        """Add the numbers of a range with so many hexadecimal digits."""
        unit = 16 ** (count - 1)
        first, last = low // unit, high // unit
        if low % unit == 0 and high % unit == unit - 1:
            self._digits(start, first, last, self._any(count - 1, end))
        elif first == last:
            after = self.node()
            self._digits(start, first, first, after)
            self._hex(after, low % unit, high % unit, count - 1, end)
        else:
            self._hex(start, low, (first + 1) * unit - 1, count, end)
            if last - first > 1:
                self._hex(start, (first + 1) * unit, last * unit - 1, count, end)
            self._hex(start, last * unit, high, count, end)

    def _any(self, count: int, end: int) -> int:
        """Return the node behind which any digits lead to the end."""
        if count == 0:
            return end
        known = self._free.get((count, end))
        if known is None:
            known = self._free[count, end] = self.node()
            self._digits(known, 0, 15, self._any(count - 1, end))
        return known

    def _digits(self, start: int, low: int, high: int, end: int) -> None:
        if low <= 9:
            self.edges.append((start, 0x30 + low, 0x30 + min(high, 9), end))
        if high >= 10:
            first, last = max(low, 10) - 10, high - 10
            self.edges += [(start, base + first, base + last, end) for base in (0x41, 0x61)]


@lru_cache(maxsize=512)
def string_template(ranges: CodePoints, *, raw: bool = True, escapes: Escapes = Escapes.ALL) -> Template:
    """Return how one character of these can be written: as it is and by escapes, or by one of both."""
    template = Template()
    if raw:
        template.add_raw(subtract(ranges, _NO_RAW))
    if escapes is Escapes.NONE:
        return template
    if escapes is Escapes.NEEDED:
        _add_needed(template, ranges)
        return template
    for code in _SHORT:
        if any(low <= code <= high for low, high in ranges):
            template.add_short(code)
    is_wide = not subtract(_WIDE, ranges)
    for low, high in ranges if is_wide else subtract(ranges, _PLAIN):
        template.add_coded(low, high)
    return template


def _add_needed(template: Template, ranges: CodePoints) -> None:
    for first, last in _NO_RAW:
        for code in range(first, last + 1):
            if not any(low <= code <= high for low, high in ranges):
                continue
            if code in _SHORT:
                template.add_short(code)
            else:
                template.add_text(f"\\u{code:04x}")


RAW_ASCII = subtract(subtract(complement(()), _NO_RAW), ((0x80, 0x10FFFF),))
BEYOND_ASCII = subtract(complement(()), ((0, 0x7F),))
