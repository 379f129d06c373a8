# SPDX-License-Identifier: Apache-2.0
"""Compiles what requests ask of their text's form in child processes: none holds up others or this process.

A job first goes to a fast lane; where its time is over there, it starts again in the next. Clients take turns in each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from blink.errors import BadRequestError, BlinkError, ClientLimitError, OverloadedError
from blink.grammar.automaton import Automaton
from blink.request.automata import Ask, AutomatonCache, name_ask
from blink.request.compile_child import PARAM
from blink.request.lane import Job, Lane, Pace
from blink.structured_outputs import StructuredOutputsParams

# Most requests take a few milliseconds. The last lane's time is what a request may take at most.
_PACES = (
    Pace(cpu_seconds=0.05, niceness=2, is_ready=True),
    Pace(cpu_seconds=0.4, niceness=5, is_ready=False),
    Pace(cpu_seconds=2.0, niceness=5, is_ready=False),
)
_COMPILER = "blink.grammar.compiler:compile_structured"
_MAX_CLIENT_JOBS = 256
_MAX_JOBS = 4096


class Client(NamedTuple):
    """Who waits, and how to learn that it does so no longer.

    Args:
        flow: a number that all of its requests have.
        on_leave: calls back with an error, once, if the client leaves inside of the block.
    """

    flow: int
    on_leave: Callable[[Callable[[BlinkError], None]], AbstractContextManager[None]]


class Compilation:
    """Compile what requests ask for, each once for all who ask at the same time. Use from one event loop only."""

    def __init__(self, paces: tuple[Pace, ...] = _PACES, compiler: str = _COMPILER) -> None:
        self._cache = AutomatonCache()
        self._jobs: dict[bytes, Job] = {}
        self._num_jobs: Counter[int] = Counter()  # by flow
        self._lanes = [Lane(pace, compiler, self._end) for pace in paces]

    def start(self) -> None:
        """Have a process ready for the first request."""
        self._lanes[0].prepare()

    def close(self) -> None:
        """End the processes."""
        for lane in self._lanes:
            lane.close()

    async def compile(self, params: StructuredOutputsParams, client: Client) -> Automaton:
        """Return the automaton of what a request asks for.

        Raises:
            BadRequestError: it is malformed, or nothing that can be kept, or takes too much; the message says why.
            ClientLimitError: too much of what its client asks for waits.
            OverloadedError: too much waits in all, or this machine does not get to it.
        """
        ask = name_ask(params)
        found = self._cache.find(ask.key)
        if found is not None:
            return found
        waiter: asyncio.Future[Automaton] = asyncio.get_running_loop().create_future()

        def give_up(error: BlinkError) -> None:
            if not waiter.done():
                waiter.set_exception(error)

        job = self._enter(ask, client.flow, waiter)
        try:
            with client.on_leave(give_up):
                return await waiter
        finally:
            self._leave(job, client.flow, waiter)

    def _enter(self, ask: Ask, flow: int, waiter: asyncio.Future[Automaton]) -> Job:
        job = self._jobs.get(ask.key) or Job(ask)
        if not job.flows[flow]:
            if self._num_jobs[flow] >= _MAX_CLIENT_JOBS:
                raise ClientLimitError("Too many structured_outputs of this client wait to be compiled. Retry later.")
            if len(self._jobs) >= _MAX_JOBS:
                raise OverloadedError("Too many structured_outputs wait to be compiled. Retry later.")
            self._num_jobs[flow] += 1
        self._jobs[ask.key] = job
        job.flows[flow] += 1
        job.waiters.add(waiter)
        if not job.is_running:
            self._lanes[job.lane].add(flow, job)
        return job

    def _leave(self, job: Job, flow: int, waiter: asyncio.Future[Automaton]) -> None:
        """Forget who no longer waits; without anyone the job does not start, or stops."""
        job.waiters.discard(waiter)
        job.flows[flow] -= 1
        if not job.flows[flow]:
            del job.flows[flow]
            self._lanes[job.lane].discard(flow, job)
            self._num_jobs[flow] -= 1
            if not self._num_jobs[flow]:
                del self._num_jobs[flow]
        if not job.waiters and self._jobs.get(job.ask.key) is job:
            del self._jobs[job.ask.key]

    def _end(self, job: Job, result: Automaton | BlinkError | None) -> None:
        """Tell those who wait what a job came to, or let it go on in the next lane."""
        if result is None and not job.waiters:  # it was interrupted
            return
        if result is None and job.lane + 1 < len(self._lanes):
            job.lane += 1
            for flow in job.flows:
                self._lanes[job.lane].add(flow, job)
            return
        if result is None:
            what = "memory or time" if job.has_died else "time"
            result = BadRequestError(f"structured_outputs takes too much {what} to compile.", PARAM)
        if isinstance(result, Automaton | BadRequestError):
            self._cache.keep(job.ask.key, result)
        if self._jobs.get(job.ask.key) is job:
            del self._jobs[job.ask.key]
        for waiter in [waiter for waiter in job.waiters if not waiter.done()]:
            if isinstance(result, Automaton):
                waiter.set_result(result)
            else:
                waiter.set_exception(type(result)(result.message, result.param))
