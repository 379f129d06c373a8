# SPDX-License-Identifier: Apache-2.0
"""Works off the prompts of one call: while the engine computes the first, others are planned and outputs are made."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from blink.offline.calls import Call, Request
from blink.offline.local_engine import TICK_SECONDS, LocalEngine
from blink.request.planner import Plan, PlannedSequence
from blink.request.table import SequenceTable

R = TypeVar("R")
Finish = Callable[[Request, Plan], R]  # makes the output of a request, all of whose sequences have ended

_PLANNED_AT_ONCE = 16  # requests, before completions are taken: the engine waits where they fill its queue


class CallLoop:
    """Keeps the lease and takes completions while a call's prompts are planned and computed."""

    def __init__(self, engine: LocalEngine, table: SequenceTable) -> None:
        """Use an engine and the table of its sequences."""
        self._engine = engine
        self._table = table
        self._next_tick = 0.0

    def run(
        self, requests: Sequence[Request], plan: Callable[[Request], Plan], call: Call, finish: Finish[R]
    ) -> list[R]:
        """Plan and submit all requests and return their outputs, in order, when the last one has ended.

        Raises:
            BlinkError: a request cannot be planned or computed; the others are taken away from the engine.
        """
        plans: list[Plan] = []
        outputs: list[R] = []
        waiting: deque[PlannedSequence] = deque()
        try:
            for request in requests:
                plans.append(plan(request))
                waiting += plans[-1].sequences
                if time.monotonic() >= self._next_tick:
                    self._note_tick()
                    self._engine.await_ready()
                    call.check()
                call.submit(waiting)
                if len(plans) % _PLANNED_AT_ONCE == 0:
                    self._take(call)
                    _finish(requests, plans, outputs, finish)
            while waiting or self._table.num_open:  # also what an interrupt has kept from being noted
                call.submit(waiting)
                self._wait()
                self._take(call)
                _finish(requests, plans, outputs, finish)
        finally:
            call.cancel("abort")
        return outputs

    def _take(self, call: Call) -> None:
        self._table.drain()
        call.check()

    def _wait(self) -> None:
        select.select([self._engine.client], [], [], TICK_SECONDS)
        if time.monotonic() >= self._next_tick:
            self._note_tick()
            self._table.tick()

    def _note_tick(self) -> None:
        self._next_tick = time.monotonic() + TICK_SECONDS


def _finish(requests: Sequence[Request], plans: Sequence[Plan], outputs: list[R], finish: Finish[R]) -> None:
    """Make the outputs of those that have ended and whose predecessors have."""
    while len(outputs) < len(plans):
        plan = plans[len(outputs)]
        if any(planned.generation.finish_reason is None for planned in plan.sequences):
            return
        outputs.append(finish(requests[len(outputs)], plan))
