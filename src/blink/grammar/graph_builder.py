# SPDX-License-Identifier: Apache-2.0
"""Expressions as nodes and edges."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from blink.grammar.errors import GrammarTooLargeError
from blink.grammar.escapes import Template, string_template
from blink.grammar.expression import (
    EMPTY,
    Block,
    Call,
    Chars,
    Choice,
    CodePoints,
    Escape,
    Expression,
    Mark,
    Marked,
    Members,
    Paths,
    Regular,
    Repeat,
    Series,
    Text,
    Until,
    Without,
)
from blink.grammar.utf8 import byte_sequences
from blink.region.layout import CONSTANTS, StructPacker, struct_dtype

_EMPTY, _RULE = 0x110000, 0x110001  # csrc/automaton/machine.h
_MAX_EDGES = 1_000_000
_MAX_COUNT = 100_000
_MAX_COUNTED = 10_000
_MAX_DEPTH = 200
_BLOCKS = (48, 8)  # of a longer repetition, this many are a rule of their own
_SPECIAL = CONSTANTS["special_token_byte"]
_GRAPH = StructPacker(struct_dtype("Graph"))


class GraphBuilder:
    """Adds expressions to a graph; each emission goes from one node to another."""

    def __init__(self, rules: Mapping[str, Expression], inline: Collection[object], *, of_bytes: bool = True) -> None:
        self.edges = array("I")
        self.table = array("I")  # start, end and kind of each rule (csrc/automaton/machine.h)
        self.num_nodes = 0
        self._rules = rules
        self._inline = inline
        self._of_bytes = of_bytes
        self._open: list[object] = []  # the rules around, outermost first
        self._numbers: dict[object, int] = {}
        self._left: list[tuple[object, Expression, int, int]] = []
        self._depth = 0

    def graph(self) -> bytes:
        """Return what the library reads, a Graph; valid as long as this object does not change."""
        (edges, num_edges), (rules, num_rules) = self.edges.buffer_info(), self.table.buffer_info()
        sizes = {"num_edges": num_edges // 4, "num_nodes": self.num_nodes, "num_rules": num_rules // 4}
        return _GRAPH.pack({"edges": edges, "rules": rules, **sizes})

    def names(self) -> Iterable[object]:
        """Return the rules' names, by number."""
        return self._numbers

    def add_rule(self, name: object, expression: Expression, *, is_greedy: bool, mark: int = 0) -> int:
        """Return the number of a rule, whose expression will be emitted by finish()."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            start, end = self.node(), self.node()
            self.table.extend((start, end, is_greedy, mark))
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
        symbols = text.data if self._of_bytes else [ord(char) for char in text.data.decode()]
        if not symbols:
            return self.skip(start, end)
        for symbol in symbols[:-1]:
            after = self.node()
            self.edge(start, symbol, symbol, after)
            start = after
        return self.edge(start, symbols[-1], symbols[-1], end)

    def _chars(self, chars: Chars, start: int, end: int) -> None:
        self._class(chars.ranges, start, end)

    def _class(self, ranges: CodePoints, start: int, end: int, template: Template | None = None) -> None:
        if not self._of_bytes:
            for low, high in ranges:
                self.edge(start, low, high, end)
        elif template is not None:
            self._template(template, start, end)
        else:
            for sequence in byte_sequences(ranges):
                at = start
                for place, (low, high) in enumerate(sequence, 1):
                    after = end if place == len(sequence) else self.node()
                    self.edge(at, low, high, after)
                    at = after

    def _escape(self, escape: Escape, start: int, end: int) -> None:
        self._template(string_template(escape.ranges, raw=False, escapes=escape.escapes), start, end)

    def _template(self, template: Template, start: int, end: int) -> None:
        nodes = [start, end, *(self.node() for _ in range(template.num_nodes - 2))]
        for one, low, high, other in template.edges:
            self.edge(nodes[one], low, high, nodes[other])

    def _regular(self, regular: Regular, start: int, end: int) -> None:
        language = regular.language
        nodes = [self.node() for _ in range(language.num_states)]
        if nodes:
            self.skip(start, nodes[0])
        for node, moves, is_final in zip(nodes, language.moves, language.finals, strict=True):
            for to, ranges in moves.items():
                template = string_template(ranges, escapes=regular.escapes) if regular.in_string else None
                self._class(ranges, node, nodes[to], template)
            if is_final:
                self.skip(node, end)

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
        if call.rule in self._inline and call.rule not in self._open:
            self._open.append(call.rule)
            self.emit(self._rules[call.rule], start, end)
            self._open.pop()
            return
        self.edge(start, _RULE, self.add_rule(call.rule, self._rules[call.rule], is_greedy=call.is_greedy), end)

    def _block(self, block: Block, start: int, end: int) -> None:
        self.edge(start, _RULE, self.add_rule(block, block.part, is_greedy=True), end)

    def _marked(self, marked: Marked, start: int, end: int) -> None:
        is_greedy = marked.mark is Mark.SEPARATOR
        self.edge(start, _RULE, self.add_rule(marked, marked.part, is_greedy=is_greedy, mark=marked.mark), end)

    def _members(self, members: Members, start: int, end: int) -> None:
        """Emit nodes for each number of members there are: none, one, ... up to what has to be counted."""
        least, most = members.least, members.most
        limit = max(1, least if most is None else most)
        if (least > 1 or most is not None) and limit * len(members.items) > _MAX_COUNTED:
            raise GrammarTooLargeError("minProperties or maxProperties has too much to count")
        nodes: dict[int, int] = {0: start}
        for item, is_required in members.items:
            after: dict[int, int] = {}
            for count, node in nodes.items():
                up = min(count + 1, limit)
                if up > count or most is None:
                    before = node
                    if count > 0:
                        before = self.node()
                        self.emit(members.separator, node, before)
                    self.emit(item, before, after.setdefault(up, self.node()))
                if not is_required:
                    self.skip(node, after.setdefault(count, self.node()))
            nodes = after
        self._others(members, nodes, end)

    def _paths(self, paths: Paths, start: int, end: int) -> None:
        """Emit two nodes for each state: before and behind the separator."""
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for state in dict.fromkeys(other for _, _, other in paths.edges):
            firsts[state], lasts[state] = self.node(), self.node()
            self.emit(paths.separator, firsts[state], lasts[state])
        for one, item, other in paths.edges:
            if one in lasts:
                self.emit(item, lasts[one], firsts[other])
            if one == 0:  # where nothing stands before it
                self.emit(item, start, firsts[other])
        if 0 in paths.ends:
            self.skip(start, end)
        for state in paths.ends:
            if state in firsts:
                self.emit(paths.behind, firsts[state], end)

    def _others(self, members: Members, nodes: dict[int, int], end: int) -> None:
        """Emit the members behind those that are listed. Their names may repeat, so they count as one for `least`."""
        least, most, others = members.least, members.most, members.others
        for count, node in nodes.items():
            if count >= least:
                self.emit(members.behind if count > 0 else EMPTY, node, end)
            if others is None or count + 1 < least or (most is not None and count >= most):
                continue
            after = node
            if count > 0:
                after = self.node()
                self.emit(members.separator, node, after)
            left = None if most is None else most - count - 1
            more = Repeat(Series((members.separator, others)), 0, left)
            self.emit(Series((others, more, members.behind)), after, end)

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
        for size in _BLOCKS:
            name = (repeat.part, "up to", size)
            if left < 2 * size or not self._of_bytes or name in self._inline:
                continue
            number = self.add_rule(name, Repeat(repeat.part, 1, size), is_greedy=True)
            for _ in range(left // size):
                self.skip(start, end)
                after = self.node()
                self.edge(start, _RULE, number, after)
                start = after
            left %= size
        for _ in range(left):
            self.skip(start, end)
            after = self.node()
            self.emit(repeat.part, start, after)
            start = after
        return self.skip(start, end)

    def _repeat_exactly(self, part: Expression, count: int, start: int) -> int:
        for size in _BLOCKS:
            name = (part, "exactly", size)
            if count < 2 * size or not self._of_bytes or name in self._inline:
                continue
            number = self.add_rule(name, Repeat(part, size, size), is_greedy=False)
            for _ in range(count // size):
                after = self.node()
                self.edge(start, _RULE, number, after)
                start = after
            count %= size
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
        for place in until.places:
            special = self.node()
            self.edge(nodes[place], _SPECIAL, _SPECIAL, special)
            self._text(Text(trigger[place:]), special, behind)
        self.emit(until.rest, behind, end if until.is_once else nodes[0])

    def _without(self, without: Without, start: int, end: int) -> None:
        """Emit the automaton of Aho and Corasick: a node for each beginning of a word, whose ends lead nowhere."""
        words = without.words
        beginnings = {word[:size] for word in words for size in range(len(word))}
        nodes = {seen: self.node() for seen in beginnings if not any(word in seen for word in words)}
        root = nodes[b""]
        self.skip(start, root)
        own = sorted({byte for word in words for byte in word})
        others = [*zip([0, *(byte + 1 for byte in own)], [*(byte - 1 for byte in own), _SPECIAL], strict=True)]
        for seen, node in nodes.items():
            self.skip(node, end)
            for low, high in others:
                if low <= high:
                    self.edge(node, low, high, root)
            for byte in own:
                text = seen + bytes([byte])
                if not text.endswith(words):
                    longest = next(text[at:] for at in range(len(text) + 1) if text[at:] in nodes)
                    self.edge(node, byte, byte, nodes[longest])


def _overlap(trigger: bytes, text: bytes) -> int:
    """Return how much of the trigger's beginning the text ends with."""
    return next(size for size in range(len(text), -1, -1) if text.endswith(trigger[:size]))


_EMITTERS: dict[type[Expression], Callable[[GraphBuilder, Any, int, int], None]] = {
    Text: GraphBuilder._text,
    Chars: GraphBuilder._chars,
    Series: GraphBuilder._series,
    Choice: GraphBuilder._choice,
    Repeat: GraphBuilder._repeat,
    Members: GraphBuilder._members,
    Paths: GraphBuilder._paths,
    Call: GraphBuilder._call,
    Block: GraphBuilder._block,
    Marked: GraphBuilder._marked,
    Regular: GraphBuilder._regular,
    Escape: GraphBuilder._escape,
    Until: GraphBuilder._until,
    Without: GraphBuilder._without,
}
