# SPDX-License-Identifier: Apache-2.0
"""Runs one load: starts the client processes, gives them one common start, gathers what they saw."""

from __future__ import annotations

import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, Final

from blink.bench.client import ClientPlan, run_client
from blink.bench.record import ClientResult, Endpoint, PlannedRequest, Progress, Record
from blink.bench.usage import Usage, UsageMeter
from blink.errors import BlinkError

_HEAD_START: Final = 0.05  # seconds for the clients to hear of the start
_NO_METER: Final = UsageMeter()


@dataclass(frozen=True, slots=True)
class Measurement:
    """What all clients saw of one load."""

    records: list[Record]  # in the order of the plan
    loop_lags: array[float]  # seconds
    usage: Usage
    seconds: float  # between the two readings of the usage
    start: float = 0.0  # by the monotonic clock: what the times of records count from

    def split(self) -> dict[str, Measurement]:
        """Return the parts to report by the names of their classes: "" where all requests are of one."""
        classes = dict.fromkeys(record.request_class for record in self.records)
        if len(classes) < 2:
            return {"": self}
        parts = {
            name: replace(self, records=[one for one in self.records if one.request_class == name], usage=Usage())
            for name in sorted(classes)
        }
        return {**parts, "both": self}


def measure(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    *,
    processes: int = 1,
    cpus: tuple[int, ...] = (),
    meter: UsageMeter = _NO_METER,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Measurement:
    """Send `requests` from `processes` client processes; return when every answer has ended.

    Raises:
        BlinkError: a client process cannot start, or died.
    """
    context = multiprocessing.get_context("spawn")
    clients: list[Any] = []
    pipes: list[Pipe] = []
    try:
        for index in range(processes):
            ours, theirs = context.Pipe()
            plan = ClientPlan(endpoint, list(requests[index::processes]), cpus, os.getpid())
            client = context.Process(target=run_client, args=(theirs, plan), daemon=True)
            client.start()
            theirs.close()
            clients.append(client)
            pipes.append(ours)
        for pipe in pipes:
            _receive(pipe)  # it is ready
        began, before = time.monotonic(), meter.read()
        for pipe in pipes:
            pipe.send(began + _HEAD_START)
        results = _gather(pipes, on_progress)
        usage = meter.read().since(before)
        seconds = time.monotonic() - began
    finally:
        for client in clients:
            client.kill()
            client.join()
    records = sorted((record for result in results for record in result.records), key=lambda record: record.index)
    lags = array("d", (lag for result in results for lag in result.loop_lags))
    return Measurement(records, lags, usage, seconds, began + _HEAD_START)


def _gather(pipes: list[Pipe], on_progress: Callable[[Progress], None]) -> list[ClientResult]:
    """Wait for every client's result; pass on the sum of what they report on the way."""
    results: dict[Pipe, ClientResult] = {}
    reports = dict.fromkeys(pipes, Progress(0, 0, 0))
    while len(results) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in results]):
            assert isinstance(pipe, Pipe)
            message = _receive(pipe)
            if isinstance(message, ClientResult):
                results[pipe] = message
            else:
                reports[pipe] = message
        seen = reports.values()
        total = Progress(sum(r.num_sent for r in seen), sum(r.num_ok for r in seen), sum(r.num_bad for r in seen))
        on_progress(total)
    return list(results.values())


def _receive(pipe: Pipe) -> Any:
    try:
        message = pipe.recv()
    except EOFError as error:
        raise BlinkError("a client process died; its message is above") from error
    if isinstance(message, BlinkError):
        raise message
    return message
