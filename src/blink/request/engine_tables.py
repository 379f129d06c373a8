# SPDX-License-Identifier: Apache-2.0
"""One table of sequences for each engine of a server, used as one: an engine that is lost takes only its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blink.errors import BlinkError, EngineUnavailableError, OverloadedError
from blink.link.group import EngineGroup
from blink.request.planner import PlannedSequence
from blink.request.routing import Load, PrefixRouter
from blink.request.table import Observer, Owner, SequenceTable

_ENGINE_SHIFT = 64  # bits of an engine's own ids


class EngineTables:
    """Give each sequence to an engine. Ids name the engine too. Use from one thread at a time."""

    def __init__(
        self,
        group: EngineGroup,
        observers: Sequence[Observer],
        defer: Callable[[Callable[[], None]], object],
    ) -> None:
        """Use a group of engines, each with an observer of its own; defer: as a table's."""
        self._group = group
        self.tables = [
            SequenceTable(client, observer, defer) for client, observer in zip(group.clients, observers, strict=True)
        ]
        self._router = PrefixRouter()
        self._boots = [0] * len(self.tables)

    @property
    def num_open(self) -> int:
        """Return how many sequences are with the engines."""
        return sum(table.num_open for table in self.tables)

    @property
    def num_waiting(self) -> int:
        """Return how many of them no engine has admitted yet."""
        return sum(table.num_waiting for table in self.tables)

    def submit(self, owner: Owner, planned: PlannedSequence) -> int:
        """Give a sequence to an engine; return its id.

        Raises:
            OverloadedError: all engines are full.
            EngineUnavailableError: none is ready.
        """
        if len(self.tables) == 1:
            return self.tables[0].submit(owner, planned)
        hashes, loads = planned.prompt.block_hashes, self._loads()
        refusal: OverloadedError | EngineUnavailableError = EngineUnavailableError(self._group.unavailable_reason)
        for engine in self._router.rank(hashes, loads):
            try:
                sequence = self.tables[engine].submit(owner, planned)
            except (OverloadedError, EngineUnavailableError) as error:
                refusal = error
                continue
            self._router.note(hashes, engine, loads[engine])
            return engine << _ENGINE_SHIFT | sequence
        raise refusal

    def cancel(self, sequence: int, reason: str) -> None:
        """Take a sequence away from its engine, if it still has it."""
        self.tables[engine_of(sequence)].cancel(sequence & (1 << _ENGINE_SHIFT) - 1, reason)

    def fail_all(self, error: BlinkError) -> None:
        """End all requests with an error."""
        for table in self.tables:
            table.fail_all(error)

    def tick(self, engine: int) -> str | None:
        """Renew the lease of an engine; when it is lost, end its requests and return why. Call four times a second."""
        lost = self.tables[engine].tick()
        if lost is not None:
            self._boots[engine] += 1
        return lost

    def drain(self) -> None:
        """Take all completions that have arrived to their owners."""
        for table in self.tables:
            table.drain()

    def forget_prefixes(self) -> None:
        """Route all prompts anew: the engines' prefix caches are empty."""
        self._router.forget()

    def _loads(self) -> dict[int, Load]:
        return {
            engine: Load(*table.client.queue(), table.num_open, self._boots[engine], table.client.silent_seconds)
            for engine, table in enumerate(self.tables)
            if table.client.ready
        }


def engine_of(sequence: int) -> int:
    """Return the number of the engine that a sequence was given to."""
    return sequence >> _ENGINE_SHIFT
