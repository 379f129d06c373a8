# SPDX-License-Identifier: Apache-2.0
"""A plain walker of automata, written from the format's description alone, and texts drawn at random from them."""

from __future__ import annotations

import random
import struct
from typing import Any

from blink.grammar.compiler import compile_structured
from blink.region.layout import CONSTANTS
from blink.structured_outputs import StructuredOutputsParams

_DEAD, _CALL, _FINAL = 0xFFFF, 0x8000, 0x80
_DEPTH = CONSTANTS["max_automaton_depth"]
Place = tuple[int, tuple[int, ...]]  # state, stack


class PlainAutomaton:
    """An automaton as lists."""

    def __init__(self, data: bytes) -> None:
        header = struct.unpack_from("<8H", data)
        num_full, num_mapped, num_sparse, num_single, self.first, self.num_classes, num_calls, num_patterns = header
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
            *entries, c0, c1, c2, c3, c4, _ = struct.unpack_from("<5H6B", data, at)
            rows.append(dict(reversed(list(zip((c0, c1, c2, c3, c4), entries, strict=True)))))
            at += 16
        for _ in range(num_single):
            entry, byte_class, _ = struct.unpack_from("<HBB", data, at)
            rows.append({byte_class: entry})
            at += 4
        at = (at + num_patterns * self.num_classes + 3) // 4 * 4
        self.rows = rows
        self.traits = data[at : at + self.num_states]

    @property
    def start(self) -> Place:
        return self.first, ()

    def take(self, place: Place, byte: int) -> Place | None:
        """Return where a byte leads to, None if it is not allowed."""
        state, stack = place
        for _ in range(CONSTANTS["max_byte_moves"]):
            entry = self.rows[state].get(self.classes[byte], _DEAD)
            if entry < _CALL:
                return (entry, stack) if self._fits(entry, stack) else None
            if entry != _DEAD:
                state, back = self.calls[entry - _CALL]
                if not self._fits(back, stack):
                    return None
                stack = (*stack, back)
                if not self._fits(state, stack):
                    return None
            elif self.traits[state] & _FINAL and stack:
                state, stack = stack[-1], stack[:-1]
            else:
                return None
        return None

    def may_end(self, place: Place) -> bool:
        state, stack = place
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
        representatives = {self.classes[byte]: byte for byte in range(256)}
        by_class: dict[int, list[int]] = {each: [] for each in representatives}
        for byte in range(256):
            by_class[self.classes[byte]].append(byte)
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
            text.append(chance.choice(by_class[each]))
        return None

    def _fits(self, state: int, stack: tuple[int, ...]) -> bool:
        return len(stack) + (self.traits[state] & (_FINAL - 1)) <= _DEPTH


def sound_automata() -> list[bytes]:
    """Return some small automata of all kinds."""
    kinds: list[dict[str, Any]] = [
        {"json_object": True},
        {"regex": "[a-c]{2,5}"},
        {"choice": ["yes", "no", "maybe"]},
        {"json": {"type": "string", "maxLength": 120}},
        {"json": {"type": "array", "items": {"type": "array", "items": {"$ref": "#"}}}},
    ]
    return [compile_structured(StructuredOutputsParams(**kind)).data for kind in kinds]
