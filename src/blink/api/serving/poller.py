# SPDX-License-Identifier: Apache-2.0
"""Drives the table of sequences from the event loop: completions in batches, the lease by a timer.

It runs as a callback of the event loop: no task, future or lock per token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from blink.api.observe.metrics import Metrics
from blink.api.observe.sequence_metrics import SequenceMetrics
from blink.api.observe.stats_line import StatsLine
from blink.errors import BadRequestError, ClientLimitError, EngineUnavailableError, OverloadedError
from blink.link.client import EngineClient
from blink.request.table import SequenceTable

_TICK_SECONDS = 0.25
_RESET_LOOK_SECONDS = 0.005

logger = logging.getLogger(__name__)


class Poller:
    """Own the engine client and the table of sequences. Use from the event loop only."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        max_waiting: int,
        max_client_share: float = 1.0,
        observer: SequenceMetrics | None = None,
        stats_line: StatsLine | None = None,
    ) -> None:
        self.client = client
        self._max_client_share = max_client_share
        self._by_flow: Counter[int] = Counter()
        self.metrics = metrics
        self._max_waiting = max_waiting
        # What an event loop's callback writes leaves behind it, in no order: a later callback's follows.
        self.table = SequenceTable(
            client,
            observer or SequenceMetrics(metrics),
            defer=lambda call: asyncio.get_running_loop().call_soon(call),
        )
        self._stats_line = stats_line
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look after the completion queue and the engine from now on."""
        asyncio.get_running_loop().add_reader(self.client.fileno(), self.table.drain)
        self._tick()

    def stop(self) -> None:
        """Leave the engine and give the queue pair back."""
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self.client.fileno())
        self.client.close()

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
        """Empty the engine's prefix cache; return when it is.

        Raises:
            EngineUnavailableError: there is no engine, or it goes.
        """
        before = self.client.stats().get("prefix_resets", 0)
        self.client.reset_prefix_cache()
        while self.client.stats().get("prefix_resets", 0) == before:
            if not self.client.ready:
                raise EngineUnavailableError(f"Not available: {self.client.unavailable_reason}.")
            await asyncio.sleep(_RESET_LOOK_SECONDS)

    def _check_share(self, flow: int, num_sequences: int) -> None:
        info = self.client.info
        if info is None or self._max_client_share >= 1:
            return
        limit = max(1, int(self._max_client_share * info.max_sequences))
        if num_sequences > limit:
            raise BadRequestError(f"One client may ask for at most {limit} sequences at once.", "n")
        if self._by_flow[flow] + num_sequences > limit:
            raise ClientLimitError(f"This client has {self._by_flow[flow]} of its {limit} sequences. Retry later.")

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        self.metrics.keep(self.table.num_open, self.table.num_waiting)
        if self._stats_line is not None:
            self._stats_line.look(time.monotonic())
        was_ready, num_open = self.client.ready, self.table.num_open
        lost = self.table.tick()
        if lost is not None:
            logger.error("%s: %d open sequences failed", lost, num_open)
        if self.client.ready and self.client.info is not None and (lost is not None or not was_ready):
            self.metrics.model_name = self.metrics.model_name or self.client.info.model
            logger.info("connected to the engine of %s", self.client.info.model)
