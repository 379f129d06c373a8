# SPDX-License-Identifier: Apache-2.0
"""A plain walker of automata, written from the format's description alone, and texts drawn at random from them."""

from __future__ import annotations

import random
import struct
from typing import Any, NamedTuple

from blink.grammar.compiler import compile_structured
from blink.region.layout import CONSTANTS
from blink.structured_outputs import StructuredOutputsParams

_DEAD, _CALL, _FINAL, _NEED, _MARK = 0xFFFF, 0x8000, 0x80, 0x1F, 0x8000
_DEPTH = CONSTANTS["max_automaton_depth"]
_MOST_ITEMS, _MOST_OF_TOKEN, _TRAIL = (
    CONSTANTS[f"{each}"] for each in ("max_unique_items", "max_token_items", "trail")
)
ITEM_END = 256
ItemText = tuple[int, ...]  # bytes, and ITEM_END behind one that could have gone on


class Items(NamedTuple):
    """What a place knows of the items that have to differ."""

    depth: int = 0  # of the stack in the open item; 0: none is open
    text: ItemText = ()  # of the open item so far
    trail: tuple[int | None, ...] = ()  # the states before its symbols, the last one's first
    closed: frozenset[ItemText] = frozenset()  # where no item may come to
    completed: tuple[tuple[ItemText, tuple[int | None, ...]], ...] = ()  # by the token that is being taken


class Place(NamedTuple):
    """Where a text stands."""

    state: int
    stack: tuple[int, ...] = ()
    items: Items = Items()


class PlainAutomaton:
    """An automaton as lists."""

    def __init__(self, data: bytes) -> None:
        header = struct.unpack_from("<8H", data)
        num_full, num_mapped, num_sparse, num_single, start, self.num_classes, num_calls, num_patterns = header
        self.first, self.has_items = start & ~_MARK, bool(start & _MARK)
        self.num_states = num_full + num_mapped + num_sparse + num_single
        self.classes = data[16:272]
        calls = struct.unpack_from(f"<{2 * num_calls}H", data, 272)
        self.calls = list(zip(calls[::2], calls[1::2], strict=True))
        at = 272 + 4 * num_calls
        full = struct.unpack_from(f"<{num_full * self.num_classes}H", data, at)
        rows = [dict(enumerate(full[i * self.num_classes : (i + 1) * self.num_classes])) for i in range(num_full)]
        at = (at + 2 * len(full) + 15) // 16 * 16
        patterns = at + 16 * (num_mapped + num_sparse) + 4 * num_single
        for _ in range(num_mapped):
            pattern, *entries = struct.unpack_from("<8H", data, at)
            first = patterns + pattern * self.num_classes
            slots = data[first : first + self.num_classes]
            rows.append({each: entries[slot] for each, slot in enumerate(slots) if slot < 7})
            at += 16
        for _ in range(num_sparse):
            *entries, c0, c1, c2, c3, c4, _guess = struct.unpack_from("<5H6B", data, at)
            rows.append(dict(reversed(list(zip((c0, c1, c2, c3, c4), entries, strict=True)))))
            at += 16
        for _ in range(num_single):
            entry, byte_class, _guess = struct.unpack_from("<HBB", data, at)
            rows.append({byte_class: entry})
            at += 4
        at = (at + num_patterns * self.num_classes + 3) // 4 * 4
        self.rows = rows
        self.traits = data[at : at + self.num_states]
        self.counts = self._count_texts() if self.has_items else []

    @property
    def start(self) -> Place:
        return Place(self.first)

    def take(self, place: Place, byte: int) -> Place | None:
        """Return where a byte leads to, None if it is not allowed."""
        return self.take_token(place, bytes([byte]))

    def take_token(self, place: Place, token: bytes) -> Place | None:
        """Return where a token leads to, None if it is not allowed."""
        found: Place | None = place
        for byte in token:
            found = None if found is None else self._take(found, byte)
        if found is None or not found.items.completed:
            return found
        return found._replace(items=self._settle(found.items))

    def _take(self, place: Place, byte: int) -> Place | None:
        state, stack, items = place
        is_direct = True
        for _ in range(CONSTANTS["max_byte_moves"]):
            entry = self.rows[state].get(self.classes[byte], _DEAD)
            if entry < _CALL:
                after = self._go_on(items, byte, state if is_direct else None, entry, stack)
                return Place(entry, stack, after) if after is not None and self._fits(entry, stack) else None
            if entry != _DEAD:
                state, back = self.calls[entry - _CALL]
                if self.has_items:
                    is_item, is_limit = bool(state & _MARK), bool(back & _MARK)
                    if is_item:
                        known = Items() if is_limit else items
                        items = Items(len(stack) + 1, closed=known.closed, completed=known.completed)
                    elif is_limit and (len(items.closed) == _MOST_ITEMS or () in items.closed):
                        return None
                    state, back = state & ~_MARK, back & ~_MARK
                if not self._fits(back, stack):
                    return None
                stack = (*stack, back)
                if not self._fits(state, stack):
                    return None
            elif self.traits[state] & _FINAL and stack:
                if items.depth and items.depth == len(stack):
                    trail = (state if is_direct else None, *items.trail)
                    ended = self._complete(items, (*items.text, ITEM_END), trail)
                    if ended is None:
                        return None
                    items = ended
                state, stack, is_direct = stack[-1], stack[:-1], False
            else:
                return None
        return None

    def _go_on(self, items: Items, byte: int, before: int | None, state: int, stack: tuple[int, ...]) -> Items | None:
        """Return the items behind a byte from state `before`, None if another item was there."""
        if not items.depth:
            return items
        trail = (before if len(stack) == items.depth else None, *items.trail)[:_TRAIL]
        text = (*items.text, byte)
        while len(stack) > items.depth and self.traits[state] & _FINAL and self.counts[state] == 1:
            state, stack = stack[-1], stack[:-1]
        if len(stack) == items.depth and self.counts[state] <= _MOST_ITEMS and text in items.closed:
            return None
        if len(stack) == items.depth and self.counts[state] == 1:
            return self._complete(items, text, trail)
        return items._replace(text=text, trail=trail)

    def _complete(self, items: Items, text: ItemText, trail: tuple[int | None, ...]) -> Items | None:
        is_full = len(items.completed) == _MOST_OF_TOKEN or len(items.closed) == _MOST_ITEMS
        if text in items.closed or is_full:
            return None
        return Items(0, (), (), items.closed | {text}, (*items.completed, (text, trail[:_TRAIL])))

    def _settle(self, items: Items) -> Items:
        """Close the beginnings of items behind which nothing is open."""
        closed = items.closed
        for text, trail in items.completed:
            for state in trail:
                text = text[:-1]
                if state is None or self.counts[state] > _MOST_ITEMS:
                    break
                behind = {(*text, symbol) for symbol in self._symbols(state)}
                if not behind <= closed:
                    break
                closed = closed - behind | {text}
        return items._replace(closed=closed, completed=())

    def _symbols(self, state: int) -> list[int]:
        row = self.rows[state]
        found = [byte for byte in range(256) if row.get(self.classes[byte], _DEAD) != _DEAD]
        return [*found, ITEM_END] if self.traits[state] & _FINAL else found

    def _count_texts(self) -> list[int]:
        """Return how many texts lead from each state to its rule's end; above the most items, one more than those."""
        many = _MOST_ITEMS + 1
        widths = [list(self.classes).count(each) for each in range(256)]
        counts = [many] * self.num_states
        known: set[int] = set()
        while True:
            more = [
                state
                for state, row in enumerate(self.rows)
                if state not in known and all(entry in known for entry in row.values() if entry != _DEAD)
            ]
            if not more:
                return counts
            for state in more:
                ways = [(widths[each], counts[to]) for each, to in self.rows[state].items() if to != _DEAD]
                counts[state] = min(many, (self.traits[state] >= _FINAL) + sum(one * other for one, other in ways))
            known.update(more)

    def may_end(self, place: Place) -> bool:
        state, stack, _ = place
        while self.traits[state] & _FINAL:
            if not stack:
                return True
            state, stack = stack[-1], stack[:-1]
        return False

    def accepts(self, text: bytes) -> bool:
        found: Place | None = self.start
        for byte in text:
            found = None if found is None else self.take(found, byte)
        return found is not None and self.may_end(found)

    def draw(self, chance: random.Random, length: int) -> bytes | None:
        """Return a random text; one that has come to no end when it is ten times too long is None."""
        place, text = self.start, bytearray()
        # Of items that have to differ each byte is another case, else those of one class are alike.
        group_of = range(256) if self.has_items else self.classes
        representatives = {group_of[byte]: byte for byte in range(256)}
        groups: dict[int, list[int]] = {each: [] for each in representatives}
        for byte in range(256):
            groups[group_of[byte]].append(byte)
        while len(text) < 10 * length:
            if self.may_end(place) and (len(text) > length or chance.random() < 0.2):
                return bytes(text)
            options = [(each, found) for each, byte in representatives.items() if (found := self.take(place, byte))]
            if not options:
                assert self.may_end(place), f"a dead end behind {bytes(text)!r}"
                return bytes(text)
            if len(text) > length:  # towards an end: closing brackets and quotes
                closing = [option for option in options if representatives[option[0]] in b'"]}']
                options = closing or options
            each, place = chance.choice(options)
            text.append(chance.choice(groups[each]))
        return None

    def _fits(self, state: int, stack: tuple[int, ...]) -> bool:
        return len(stack) + (self.traits[state] & _NEED) <= _DEPTH


def sound_automata() -> list[bytes]:
    """Return some small automata of all kinds."""
    kinds: list[dict[str, Any]] = [
        {"json_object": True},
        {"regex": "[a-c]{2,5}"},
        {"choice": ["yes", "no", "maybe"]},
        {"json": {"type": "string", "maxLength": 120}},
        {"json": {"type": "array", "items": {"type": "array", "items": {"$ref": "#"}}}},
        {"json": {"type": "array", "items": {"type": ["string", "integer"]}, "uniqueItems": True}},
    ]
    return [compile_structured(StructuredOutputsParams(**kind)).data for kind in kinds]
