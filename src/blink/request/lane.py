# SPDX-License-Identifier: Apache-2.0
"""One child process that compiles, and the jobs that wait for it."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, OverloadedError
from blink.grammar.automaton import Automaton
from blink.host.child import Child
from blink.request.automata import Ask
from blink.request.compile_child import PARAM, Outcome
from blink.request.turns import Turns

_BOOT_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # of processor time, in which the child should have given up by itself
_STALL_SECONDS = 5.0  # and twenty times the time it has: a machine that gives less runs nothing
_LINGER_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a lane works on one job, and at which priority."""

    cpu_seconds: float
    niceness: int
    is_ready: bool  # its child stays when there is nothing to do


@dataclass(eq=False)
class Job:
    """What is compiled once for all who ask for it."""

    ask: Ask
    lane: int = 0
    is_running: bool = False
    has_died: bool = False  # the last child that tried it
    flows: Counter[int] = field(default_factory=Counter[int])  # the clients of those who wait
    waiters: set[asyncio.Future[Automaton]] = field(default_factory=set["asyncio.Future[Automaton]"])


class Lane:
    """Compile one job after the other. Use from the event loop only.

    Args:
        compiler: the function that the child calls, as MODULE:FUNCTION.
        end: called when a job has come to an end: with its result, with the error that this machine is to blame for,
            or with None where its time was over.
    """

    def __init__(self, pace: Pace, compiler: str, end: Callable[[Job, Automaton | BlinkError | None], None]) -> None:
        self._pace = pace
        self._compiler = compiler
        self._end = end
        self._turns = Turns[Job](lambda job: job.ask.num_bytes)
        self._work: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._is_booted = False
        self._retirement: asyncio.TimerHandle | None = None

    def prepare(self) -> None:
        """Start the child if there is none."""
        if self._child is None or not self._child.is_alive:
            self._is_booted, self._child = False, None
            try:
                self._child = Child("blink.request.compile_child", self._compiler, niceness=self._pace.niceness)
            except OSError as error:
                logger.warning("no process that compiles structured outputs can be started: %r", error)

    def add(self, flow: int, job: Job) -> None:
        """Let a job wait in a client's name."""
        self._turns.add(flow, job)
        if self._retirement is not None:
            self._retirement.cancel()
            self._retirement = None
        if self._work is None:
            self._work = asyncio.create_task(self._work_off())

    def discard(self, flow: int, job: Job) -> None:
        """Let a job no longer wait in a client's name, if it did."""
        self._turns.discard(flow, job)

    def close(self) -> None:
        """End the child."""
        if self._work is not None:
            self._work.cancel()
        if self._retirement is not None:
            self._retirement.cancel()
        self._drop_child()

    async def _work_off(self) -> None:
        try:
            while (job := self._turns.take()) is not None:
                job.is_running = True
                result = await self._try(job)
                job.is_running = False
                self._end(job, result)
        finally:
            self._work = None
        if not self._pace.is_ready:
            self._retirement = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._drop_child)

    async def _try(self, job: Job) -> Automaton | BlinkError | None:
        try:
            return await self._run(job)
        except BlinkError as error:
            return error
        except Exception:
            logger.exception("structured outputs could not be compiled")
            self._drop_child()
            return BlinkError("Internal error: compiling structured outputs.")

    async def _run(self, job: Job) -> Automaton | BadRequestError | None:
        child = await self._ready_child()
        try:
            outcome = await self._watch(child, job)
        except OverloadedError:
            self._drop_child()
            raise
        if outcome.trouble:
            logger.error("structured outputs could not be compiled:\n%s", outcome.trouble)
        if outcome.is_worn:
            self._drop_child()
        if self._pace.is_ready:
            self.prepare()
        return outcome.result

    async def _watch(self, child: Child, job: Job) -> Outcome:
        """Let the child compile; kill it where it does not keep to its time."""
        job.has_died = False
        loop = asyncio.get_running_loop()
        started, ran = loop.time(), child.read_cpu_seconds()
        answer = asyncio.ensure_future(self._ask(child, job))
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_SECONDS))[0]:
                if not job.waiters:
                    child.interrupt()
                if child.read_cpu_seconds() - ran > self._pace.cpu_seconds + _GRACE_SECONDS:
                    logger.warning("the process that compiles structured outputs was killed: it does not stop")
                    return Outcome(None, is_worn=True)
                if loop.time() - started > _STALL_SECONDS + 20 * self._pace.cpu_seconds:
                    raise OverloadedError("This machine is too busy to compile structured_outputs. Retry later.")
            return answer.result()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("the process that compiles structured outputs died: %r", error)
            job.has_died = True
            return Outcome(None, is_worn=True)
        finally:
            answer.cancel()

    async def _ask(self, child: Child, job: Job) -> Outcome:
        try:
            message = pickle.dumps((job.ask.params, self._pace.cpu_seconds))
        except RecursionError:
            return Outcome(BadRequestError("structured_outputs is nested too deeply.", PARAM))
        await child.send(message)
        return pickle.loads(await child.receive())

    async def _ready_child(self) -> Child:
        self.prepare()
        try:
            if self._child is None:
                raise EOFError
            if not self._is_booted:
                await asyncio.wait_for(self._child.receive(), _BOOT_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            self._drop_child()
            raise EngineUnavailableError("The process that compiles structured_outputs does not start.") from error
        self._is_booted = True
        return self._child

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
