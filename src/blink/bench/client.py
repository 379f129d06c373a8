# SPDX-License-Identifier: Apache-2.0
"""One client process: sends its requests at their times whatever the server does, and watches its own lateness.

It loads neither numpy nor httpx, so that it starts at once and has little to do.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Final

import uvloop

from blink.bench.connection import Connection, Exchange
from blink.bench.record import ClientResult, Endpoint, PlannedRequest, Progress, Record
from blink.errors import ConfigError
from blink.host.isolation import pin
from blink.host.process import die_with_parent

_LAG_INTERVAL: Final = 0.01  # seconds between samples of the event loop's lag
_PROGRESS_INTERVAL: Final = 0.5
# Servers close idle connections after 5 s or so: do not write to one that is about to go.
_MAX_IDLE: Final = 2.0


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What one client process does."""

    endpoint: Endpoint
    requests: list[PlannedRequest]  # ascending in time
    cpus: tuple[int, ...]
    parent: int


def run_client(pipe: Pipe, plan: ClientPlan) -> None:
    """Be a client process: say that it is ready, be told the start (monotonic), send progress, then the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    die_with_parent(plan.parent, signal.SIGKILL)
    try:
        if plan.cpus:
            pin(plan.cpus)
    except ConfigError as error:
        pipe.send(error)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()  # a collection would be lag; a run leaves little garbage
    pipe.send(None)
    start: float = pipe.recv()
    pipe.send(uvloop.run(send_all(plan.endpoint, plan.requests, start, pipe.send)))


async def send_all(
    endpoint: Endpoint, requests: list[PlannedRequest], start: float, report: Callable[[Progress], None]
) -> ClientResult:
    """Send all requests at their times after `start`; return when every answer has ended."""
    client = _Client(endpoint, start)
    lags = array("d")
    watches = [asyncio.create_task(_watch_lag(lags)), asyncio.create_task(_report(client, report))]
    for request in requests:
        while (wait := start + request.at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        client.send(request)
    await client.wait()
    for watch in watches:
        watch.cancel()
    return ClientResult(client.records, lags)


class _Client:
    def __init__(self, endpoint: Endpoint, start: float) -> None:
        self.records: list[Record] = []
        self.num_sent = self.num_ok = 0
        self._endpoint = endpoint
        self._tls = endpoint.ssl_context()
        self._start = start
        self._idle: list[tuple[float, Connection]] = []  # with the time since when; the youngest last
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def send(self, request: PlannedRequest) -> None:
        """Send now, on an idle connection or a new one."""
        self.num_sent += 1
        exchange = Exchange(request, self._start, self._end)
        connection = self._take_idle()
        if connection is not None:
            self._begin(connection, exchange)
            return
        task = asyncio.create_task(self._connect(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Return when everything sent has ended."""
        while len(self.records) < self.num_sent:
            self._changed.clear()
            await self._changed.wait()
        for _, connection in self._idle:
            connection.abort()

    async def _connect(self, exchange: Exchange) -> None:
        endpoint = self._endpoint
        try:
            connecting = asyncio.get_running_loop().create_connection(
                lambda: Connection(self._free), endpoint.host, endpoint.port, ssl=self._tls
            )
            _, connection = await asyncio.wait_for(connecting, endpoint.timeout)
        except OSError as error:  # ssl.SSLError is one
            exchange.end("failed", f"cannot connect: {error}")
        except asyncio.TimeoutError:
            exchange.end("failed", f"no connection within {endpoint.timeout:g} s")
        else:
            self._begin(connection, exchange)

    def _begin(self, connection: Connection, exchange: Exchange) -> None:
        connection.begin(exchange)
        asyncio.get_running_loop().call_later(self._endpoint.timeout, self._expire, connection, exchange)

    def _expire(self, connection: Connection, exchange: Exchange) -> None:
        if not exchange.is_over:
            exchange.end("failed", f"no complete answer within {self._endpoint.timeout:g} s")
            connection.abort()

    def _free(self, connection: Connection) -> None:
        self._idle.append((time.monotonic(), connection))

    def _take_idle(self) -> Connection | None:
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_open and time.monotonic() - since < _MAX_IDLE:
                return connection
            connection.abort()
        return None

    def _end(self, exchange: Exchange) -> None:
        self.records.append(exchange.record)
        self.num_ok += exchange.record.outcome == "ok"
        self._changed.set()


async def _watch_lag(lags: array[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL)
        lags.append(max(0.0, time.monotonic() - before - _LAG_INTERVAL))


async def _report(client: _Client, report: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_INTERVAL)
        report(Progress(client.num_sent, client.num_ok, len(client.records) - client.num_ok))
