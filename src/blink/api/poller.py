# SPDX-License-Identifier: Apache-2.0
"""Drives the table of sequences from the event loop: completions in batches, the lease by a timer.

It runs as a callback of the event loop: no task, future or lock per token.
"""

from __future__ import annotations

import asyncio
import logging

from blink.api.metrics import Metrics
from blink.api.sequence_metrics import SequenceMetrics
from blink.errors import OverloadedError
from blink.link.client import EngineClient
from blink.request.table import SequenceTable

_TICK_SECONDS = 0.25

logger = logging.getLogger(__name__)


class Poller:
    """Own the engine client and the table of sequences. Use from the event loop only."""

    def __init__(self, client: EngineClient, metrics: Metrics, max_waiting: int) -> None:
        self.client = client
        self.metrics = metrics
        self._max_waiting = max_waiting
        self.table = SequenceTable(client, SequenceMetrics(metrics))
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

    def check_room(self, num_sequences: int) -> None:
        """Refuse a request that would exceed the limit of waiting sequences.

        Raises:
            OverloadedError: too many sequences wait.
        """
        num_waiting = self.table.num_waiting
        if self._max_waiting and num_waiting + num_sequences > self._max_waiting:
            raise OverloadedError(f"The queue is full: {num_waiting} sequences wait already. Retry later.")

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        was_ready, num_open = self.client.ready, self.table.num_open
        lost = self.table.tick()
        if lost is not None:
            logger.error("%s: %d open sequences failed", lost, num_open)
        if self.client.ready and self.client.info is not None and (lost is not None or not was_ready):
            self.metrics.model_name = self.metrics.model_name or self.client.info.model
            logger.info("connected to the engine of %s", self.client.info.model)
