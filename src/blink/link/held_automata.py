# SPDX-License-Identifier: Apache-2.0
"""The automata that lie in a queue pair's arena: written once, and left there until their memory is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from blink.grammar.automaton import Automaton
from blink.region.arena import Arena, span_bytes


@dataclass(slots=True)
class _Held:
    offset: int
    num_bytes: int
    num_users: int = 0  # sequences that the scheduler has not yet taken in


class HeldAutomata:
    """Share an arena's memory between automata and what else is allocated there."""

    def __init__(self, arena: Arena, write: Callable[[int, bytes], None]) -> None:
        self._arena = arena
        self._write = write
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self.idle_bytes = 0

    def hold(self, automaton: Automaton) -> int | None:
        """Return where an automaton lies, for one more sequence; None if there is no room for it."""
        held = self._held.get(automaton.name)
        if held is None:
            num_bytes = len(automaton.data)
            offset = self.allocate(num_bytes)
            if offset is None:
                return None
            self._write(offset, automaton.data)
            held = self._held[automaton.name] = _Held(offset, num_bytes)
        elif held.num_users == 0:
            self.idle_bytes -= span_bytes(held.num_bytes)
        self._held.move_to_end(automaton.name)
        held.num_users += 1
        return held.offset

    def release(self, automaton: Automaton) -> None:
        """Take back what hold() gave: the scheduler has its copy, or wants none."""
        held = self._held[automaton.name]
        held.num_users -= 1
        if held.num_users == 0:
            self.idle_bytes += span_bytes(held.num_bytes)

    def allocate(self, num_bytes: int) -> int | None:
        """Return a span of the arena, if need be one that automata leave which no sequence waits for."""
        offset = self._arena.allocate(num_bytes)
        for name in [name for name, held in self._held.items() if held.num_users == 0]:
            if offset is not None:
                break
            held = self._held.pop(name)
            self.idle_bytes -= span_bytes(held.num_bytes)
            self._arena.free(held.offset, held.num_bytes)
            offset = self._arena.allocate(num_bytes)
        return offset
