# SPDX-License-Identifier: Apache-2.0
"""From expressions to the graph that the native library makes an automaton of."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blink.grammar.errors import AmbiguousGrammarError, GrammarError, GrammarTooLargeError
from blink.grammar.expression import (
    Call,
    Chars,
    Choice,
    Expression,
    Members,
    Multiple,
    Repeat,
    Series,
    Text,
    Until,
)
from blink.region.layout import CONSTANTS
from blink.region.native import lib

_EMPTY, _RULE = 256, 257  # csrc/automaton/machine.h
_MAX_EDGES = 80_000
_MAX_COUNT = 100_000
_MAX_DEPTH = 200
_BLOCK = 48  # of a longer repetition, this many are a rule of their own
_SPECIAL = CONSTANTS["special_token_byte"]
_TOO_LARGE, _NEVER, _AMBIGUOUS = -1, -2, -3


class _Graph(ctypes.Structure):  # csrc/automaton/build.h
    _fields_ = [
        ("edges", ctypes.c_void_p),
        ("num_edges", ctypes.c_uint32),
        ("num_nodes", ctypes.c_uint32),
        ("rules", ctypes.c_void_p),
        ("num_rules", ctypes.c_uint32),
    ]


def build_automaton(root: Expression, rules: Mapping[str, Expression], *, is_inline: bool = False) -> bytes:
    """Return the automaton of the texts of `root`, whose calls are of `rules`.

    is_inline: write out calls that are not recursive and the blocks of long repetitions: more states, but fewer bytes
        that leave it open how to go on.

    Raises:
        GrammarTooLargeError: it has too many states, or takes too much work.
        AmbiguousGrammarError: one byte does not always say which rule comes next, or ends.
        GrammarError: no text fits.
    """
    builder = _Builder(rules, is_inline)
    builder.add_rule("", root, is_greedy=False)
    builder.finish()
    edges, table = builder.edges, builder.table
    graph = _Graph(edges.buffer_info()[0], len(edges) // 4, builder.num_nodes, table.buffer_info()[0], len(table) // 3)
    out = ctypes.create_string_buffer(CONSTANTS["max_automaton_bytes"])
    size: int = lib.blink_automaton_build(ctypes.addressof(graph), out)
    if size == _TOO_LARGE:
        raise GrammarTooLargeError("it needs too many states")
    if size == _AMBIGUOUS:
        raise AmbiguousGrammarError("parts that may follow each other, or stand for each other, begin alike")
    if size == _NEVER:
        raise GrammarError("no finite text fits it")
    return out.raw[:size]


class _Builder:
    """Adds expressions to a graph; each emission goes from one node to another."""

    def __init__(self, rules: Mapping[str, Expression], is_inline: bool) -> None:
        self.edges = array("I")
        self.table = array("I")  # start, end and greediness of each rule
        self.num_nodes = 0
        self._rules = rules
        self._is_inline = is_inline
        self._open: list[object] = []  # the rules around, outermost first
        self._numbers: dict[object, int] = {}
        self._left: list[tuple[object, Expression, int, int]] = []
        self._depth = 0

    def add_rule(self, name: object, expression: Expression, *, is_greedy: bool) -> int:
        """Return the number of a rule, whose expression will be emitted by finish()."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            start, end = self.node(), self.node()
            self.table.extend((start, end, is_greedy))
            self._left.append((name, expression, start, end))
        return number

    def finish(self) -> None:
        while self._left:
            name, expression, start, end = self._left.pop()
            self._open = [name]
            self.emit(expression, start, end)

    def node(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def edge(self, start: int, low: int, high: int, end: int) -> None:
        if len(self.edges) >= 4 * _MAX_EDGES:
            raise GrammarTooLargeError("it is too large")
        self.edges.extend((start, low, high, end))

    def skip(self, start: int, end: int) -> None:
        self.edge(start, _EMPTY, _EMPTY, end)

    def emit(self, expression: Expression, start: int, end: int) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarTooLargeError("it is nested too deeply")
        _EMITTERS[type(expression)](self, expression, start, end)
        self._depth -= 1

    def _text(self, text: Text, start: int, end: int) -> None:
        if not text.data:
            return self.skip(start, end)
        for byte in text.data[:-1]:
            after = self.node()
            self.edge(start, byte, byte, after)
            start = after
        return self.edge(start, text.data[-1], text.data[-1], end)

    def _chars(self, chars: Chars, start: int, end: int) -> None:
        for sequence in _sequences(chars.ranges):
            at = start
            for place, (low, high) in enumerate(sequence, 1):
                after = end if place == len(sequence) else self.node()
                self.edge(at, low, high, after)
                at = after

    def _series(self, series: Series, start: int, end: int) -> None:
        if not series.parts:
            return self.skip(start, end)
        for part in series.parts[:-1]:
            after = self.node()
            self.emit(part, start, after)
            start = after
        return self.emit(series.parts[-1], start, end)

    def _choice(self, choice: Choice, start: int, end: int) -> None:
        for option in choice.options:
            self.emit(option, start, end)

    def _call(self, call: Call, start: int, end: int) -> None:
        if self._is_inline and call.rule not in self._open:
            self._open.append(call.rule)
            self.emit(self._rules[call.rule], start, end)
            self._open.pop()
            return
        self.edge(start, _RULE, self.add_rule(call.rule, self._rules[call.rule], is_greedy=False), end)

    def _multiple(self, multiple: Multiple, start: int, end: int) -> None:
        nodes = [self.node() for _ in range(multiple.divisor)]
        self.edge(start, 0x30, 0x30, end)
        for digit in range(10):
            if digit:
                self.edge(start, 0x30 + digit, 0x30 + digit, nodes[digit % multiple.divisor])
            for rest, node in enumerate(nodes):
                self.edge(node, 0x30 + digit, 0x30 + digit, nodes[(10 * rest + digit) % multiple.divisor])
        self.skip(nodes[0], end)

    def _members(self, members: Members, start: int, end: int) -> None:
        empty, filled = start, self.node()
        can_be_empty = True
        for item, is_required in members.items:
            before, after = self.node(), self.node()
            if can_be_empty:
                self.skip(empty, before)
            self.emit(members.separator, filled, before)
            self.emit(item, before, after)
            if is_required:
                can_be_empty = False
            else:
                self.skip(filled, after)
            filled = after
        if can_be_empty and members.may_be_empty:
            self.skip(empty, end)
        self.skip(filled, end)

    def _repeat(self, repeat: Repeat, start: int, end: int) -> None:
        least, most = repeat.least, repeat.most
        if max(least, most or 0) > _MAX_COUNT:
            raise GrammarTooLargeError(f"a count may be {_MAX_COUNT} at most, got {max(least, most or 0)}")
        start = self._repeat_exactly(repeat.part, least, start)
        if most is None:
            # In a node of its own, to which nothing else leads.
            loop, after = self.node(), self.node()
            self.skip(start, loop)
            self.emit(repeat.part, loop, after)
            self.skip(after, loop)
            return self.skip(loop, end)
        left = most - least
        if not self._is_inline and left >= 2 * _BLOCK:
            block = Repeat(repeat.part, 1, _BLOCK)
            number = self.add_rule((id(repeat.part), "up to"), block, is_greedy=True)
            for _ in range(left // _BLOCK):
                self.skip(start, end)
                after = self.node()
                self.edge(start, _RULE, number, after)
                start = after
            left %= _BLOCK
        for _ in range(left):
            self.skip(start, end)
            after = self.node()
            self.emit(repeat.part, start, after)
            start = after
        return self.skip(start, end)

    def _repeat_exactly(self, part: Expression, count: int, start: int) -> int:
        if not self._is_inline and count >= 2 * _BLOCK:
            number = self.add_rule((id(part), "exactly"), Repeat(part, _BLOCK, _BLOCK), is_greedy=False)
            for _ in range(count // _BLOCK):
                after = self.node()
                self.edge(start, _RULE, number, after)
                start = after
            count %= _BLOCK
        for _ in range(count):
            after = self.node()
            self.emit(part, start, after)
            start = after
        return start

    def _until(self, until: Until, start: int, end: int) -> None:
        """Emit the automaton of Knuth, Morris and Pratt: a node for each part of the trigger that was seen."""
        trigger = until.trigger
        nodes = [self.node() for _ in trigger]
        behind = self.node()
        self.skip(start, nodes[0])
        for seen, node in enumerate(nodes):
            self.skip(node, end)
            for byte in range(256):
                if byte == _SPECIAL:
                    continue
                length = _overlap(trigger, trigger[:seen] + bytes([byte]))
                self.edge(node, byte, byte, behind if length == len(trigger) else nodes[length])
        special = self.node()
        for node in nodes:
            self.edge(node, _SPECIAL, _SPECIAL, special)
        self._text(Text(trigger), special, behind)
        self.emit(until.rest, behind, end if until.is_once else nodes[0])


def _overlap(trigger: bytes, text: bytes) -> int:
    """Return how much of the trigger's beginning the text ends with."""
    return next(size for size in range(len(text), -1, -1) if text.endswith(trigger[:size]))


_EMITTERS: dict[type[Expression], Callable[[_Builder, Any, int, int], None]] = {
    Text: _Builder._text,
    Chars: _Builder._chars,
    Series: _Builder._series,
    Choice: _Builder._choice,
    Repeat: _Builder._repeat,
    Members: _Builder._members,
    Call: _Builder._call,
    Multiple: _Builder._multiple,
    Until: _Builder._until,
}


@functools.lru_cache(maxsize=512)
def _sequences(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(sequence for low, high in ranges for sequence in _utf8_sequences(low, high))


def _utf8_sequences(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Split a range of code points, none of them a surrogate, into sequences of byte ranges."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            yield from _utf8_sequences(low, last)
            yield from _utf8_sequences(last + 1, high)
            return
    for bits in (6, 12, 18) if high > 0x7F else ():
        mask = (1 << bits) - 1
        if low & ~mask == high & ~mask:
            continue
        if low & mask:
            yield from _utf8_sequences(low, low | mask)
            yield from _utf8_sequences((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from _utf8_sequences(low, (high & ~mask) - 1)
            yield from _utf8_sequences(high & ~mask, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
