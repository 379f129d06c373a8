# SPDX-License-Identifier: Apache-2.0
"""Drives the tables of sequences from the event loop: completions in batches, the leases by a timer.

It runs as a callback of the event loop: no task, future or lock per token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from blink.api.observe.metrics import EngineMetrics, Metrics
from blink.api.observe.sequence_metrics import SequenceMetrics
from blink.api.observe.stats_line import StatsLine
from blink.errors import BadRequestError, ClientLimitError, EngineUnavailableError, OverloadedError
from blink.link.client import EngineClient
from blink.link.group import EngineGroup
from blink.region.layout import Opcode
from blink.request.engine_tables import EngineTables

_RESET_LOOK_SECONDS = 0.005

logger = logging.getLogger(__name__)


class Poller:
    """Own the clients of the engines and the tables of sequences. Use from the event loop only."""

    def __init__(
        self,
        group: EngineGroup,
        metrics: Metrics,
        max_waiting: int,
        max_client_share: float = 1.0,
        observer_of: Callable[[EngineMetrics], SequenceMetrics] = SequenceMetrics,
        stats_line: StatsLine | None = None,
    ) -> None:
        self.group = group
        self._max_client_share = max_client_share
        self._by_flow: Counter[int] = Counter()
        self.metrics = metrics
        self._max_waiting = max_waiting
        # What an event loop's callback writes leaves behind it, in no order: a later callback's follows.
        self.table = EngineTables(
            group,
            [observer_of(metrics.of(engine)) for engine in range(len(group.clients))],
            defer=lambda call: asyncio.get_running_loop().call_soon(call),
        )
        self._stats_line = stats_line
        self._timer: asyncio.TimerHandle | None = None
        self._on_connect: Callable[[], None] = lambda: None

    def start(self, on_connect: Callable[[], None] = lambda: None) -> None:
        """Look after the completion queues and the engines from now on.

        on_connect: called each time that an engine is there.
        """
        self._on_connect = on_connect
        for table in self.table.tables:
            asyncio.get_running_loop().add_reader(table.client.fileno(), table.drain)
        self._tick()

    def stop(self) -> None:
        """Leave the engines and give the queue pairs back."""
        if self._timer is not None:
            self._timer.cancel()
        for client in self.group.clients:
            asyncio.get_running_loop().remove_reader(client.fileno())
        self.group.close()

    def enter(self, flow: int, num_sequences: int) -> None:
        """Take a request in, or refuse it for lack of room; leave() takes it out again.

        Raises:
            BadRequestError: it asks for more than one client ever gets.
            ClientLimitError: its client has as many sequences as it may have.
            OverloadedError: too many sequences wait.
        """
        self._check_share(flow, num_sequences)
        num_waiting = self.table.num_waiting
        if self._max_waiting and num_waiting + num_sequences > self._max_waiting:
            raise OverloadedError(f"The queue is full: {num_waiting} sequences wait already. Retry later.")
        self._by_flow[flow] += num_sequences

    def leave(self, flow: int, num_sequences: int) -> None:
        """Give the room of a request back."""
        self._by_flow[flow] -= num_sequences
        if self._by_flow[flow] <= 0:
            del self._by_flow[flow]

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of each engine; return when they are.

        Raises:
            EngineUnavailableError: there is no engine, or one goes.
        """
        self.group.require_info()
        self.table.forget_prefixes()
        await asyncio.gather(*(_reset_prefix_cache(client) for client in self.group.clients if client.ready))

    def _check_share(self, flow: int, num_sequences: int) -> None:
        if self._max_client_share >= 1 or (info := self.group.info) is None:
            return
        limit = max(1, int(self._max_client_share * info.max_sequences))
        if num_sequences > limit:
            raise BadRequestError(f"One client may ask for at most {limit} sequences at once.", "n")
        if self._by_flow[flow] + num_sequences > limit:
            raise ClientLimitError(f"This client has {self._by_flow[flow]} of its {limit} sequences. Retry later.")

    def _tick(self) -> None:
        seconds = min(client.tick_seconds for client in self.group.clients)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)
        self.metrics.keep([(table.num_open, table.num_waiting) for table in self.table.tables])
        if self._stats_line is not None:
            self._stats_line.look(time.monotonic())
        for engine in range(len(self.group.clients)):
            self._tick_engine(engine)

    def _tick_engine(self, engine: int) -> None:
        client = self.group.clients[engine]
        name = "the engine" if len(self.group.clients) == 1 else f"engine {engine}"
        was_ready, num_open = client.ready, self.table.tables[engine].num_open
        lost = self.table.tick(engine)
        if lost is not None:
            logger.error("%s: %d open sequences of %s failed", lost, num_open, name)
        if client.ready and client.info is not None and (lost is not None or not was_ready):
            self.metrics.model_name = self.metrics.model_name or client.info.model
            logger.info("connected to %s of %s", name, client.info.model)
            self._on_connect()


async def _reset_prefix_cache(client: EngineClient) -> None:
    before = client.stats().get("prefix_resets", 0)
    client.order(Opcode.RESET_PREFIX_CACHE)
    while client.stats().get("prefix_resets", 0) == before:
        if not client.ready:
            raise EngineUnavailableError(f"Not available: {client.unavailable_reason}.")
        await asyncio.sleep(_RESET_LOOK_SECONDS)
