# SPDX-License-Identifier: Apache-2.0
"""The ranks of a CPU engine (--tensor-parallel-size): threads that compute one step in lock-step.

The engine's own thread is rank 0. It alone has a scheduler, and its plan words say what the others, its followers, run.
A rank has its part of each weight and of the KV cache. The batch is in memory that all of them read; rank 0 alone
samples, and a step is over when all ranks are done with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from blink.config import EngineConfig
from blink.engine.host_tier import HostBlocks
from blink.engine.plan_words import PlanKind, PlanWords, StepPlanWords
from blink.kernels.all_reduce import RankLostError
from blink.kernels.batch import Batch
from blink.kernels.cpu.all_reduce import CpuRanks, Exchange
from blink.kernels.cpu.thread_pool import use_own_pool
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.weights.loader import open_model
from blink.plan.site import Bucket
from blink.runner.adapters import Adapters
from blink.runner.run import Runner
from blink.runner.stream import Stream

logger = logging.getLogger("blink.engine")

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a follower runs steps on."""

    batch: Batch
    segmented_batch: Batch
    kv_cache: KvCache
    residual: Tensor  # [max_tokens, hidden]: of a step that is paused
    adapters: Adapters | None = None  # where it reads its part of each
    host: HostBlocks | None = None  # its part of each block that is kept in the host's memory


class Followers:
    """The threads of all ranks but the first."""

    def __init__(self, size: int, load: Callable[[int], Decoder], timeout: float) -> None:
        """Load each rank's part of a model on its thread, with as many threads of PyTorch's as the caller has.

        timeout: seconds that a rank waits for another while a step runs, and for its end.

        Raises:
            ConfigError: one cannot be loaded.
        """
        self._exchange = Exchange(size, timeout)
        self._words, self._done, self._step = PlanWords(size), [0] * size, 0
        self._models = [Future[Decoder]() for _ in range(size)]
        self._memory = [Future[RankMemory]() for _ in range(size)]
        self._num_threads, self._timeout = torch.get_num_threads(), timeout
        self.threads = [
            threading.Thread(target=self._follow, args=(rank, load), name=f"blink-rank-{rank}", daemon=True)
            for rank in range(1, size)
        ]
        for thread in self.threads:
            thread.start()
        self.runner = Runner(load(0), CpuRanks(self._exchange, 0))
        for rank in range(1, size):
            self._models[rank].result()

    @property
    def models(self) -> list[Decoder]:
        """The parts of all ranks."""
        return [self.runner.model, *(model.result() for model in self._models[1:])]

    def allocate(self, make: Callable[[Decoder], RankMemory]) -> None:
        """Give each follower what `make` allocates for its part of the model."""
        for memory, model in zip(self._memory[1:], self.models[1:], strict=True):
            memory.set_result(make(model))

    def run(self, plan: StepPlanWords, compute: Callable[[], _Found]) -> _Found:
        """Let the followers run a step, and rank 0 compute its part of it here; return when all are done.

        Raises:
            RankLostError: a rank has failed or does not come.
        """
        self._step += 1
        for rank in range(1, len(self._done)):
            self._words.write(rank, self._step, plan)
        self._exchange.tell()
        try:
            found = compute()
        except BaseException as error:
            self._exchange.fail(0, f"failed ({error})")
            raise
        self._done[0] = self._step
        self._exchange.wait(lambda: min(self._done) >= self._step, lambda: self._done.index(min(self._done)))
        return found

    def run_step(self, size: Bucket, compute: Callable[[], _Found], *, scoring: bool) -> _Found:
        """Run a whole step, as run() does."""
        return self.run(StepPlanWords(PlanKind.WHOLE, size.tokens, size.rows, size.decoding, scoring), compute)

    def run_segment(self, size: Bucket, layers: range, compute: Callable[[], _Found]) -> _Found:
        """Run some layers of a step, as run() does."""
        words = PlanKind.SEGMENT, size.tokens, size.rows, size.decoding, False, layers.start, layers.stop
        return self.run(StepPlanWords(*words), compute)

    def end(self) -> None:
        """Let all followers end, and wait for them, but not for one that hangs."""
        self._step += 1
        for rank, memory in enumerate(self._memory):
            self._words.write(rank, self._step, StepPlanWords(PlanKind.END))
            memory.cancel()
        self._exchange.tell()
        for thread in self.threads:
            thread.join(self._timeout if self._exchange.lost is None else 0)

    def _follow(self, rank: int, load: Callable[[int], Decoder]) -> None:
        torch.set_num_threads(self._num_threads)
        use_own_pool(rank)
        try:
            self._models[rank].set_result(load(rank))
        except BaseException as error:
            self._models[rank].set_exception(error)
            return
        try:
            self._serve(rank, Runner(self._models[rank].result(), CpuRanks(self._exchange, rank)))
        except RankLostError:
            return  # rank 0 says so
        except BaseException as error:
            logger.exception("rank %d failed", rank)
            self._exchange.fail(rank, f"failed ({error})")

    def _serve(self, rank: int, runner: Runner) -> None:
        """Run the steps that the plan words say, until they say the end."""
        if (memory := self._await_memory(rank)) is None:
            return
        runner.find_updates = None if memory.adapters is None else memory.adapters.find
        step, paused = 0, None
        while True:
            step += 1
            plan = self._await_plan(rank, step)
            if plan.kind is PlanKind.END:
                return
            if memory.host is not None:
                memory.host.copy(memory.kv_cache)
            if plan.kind is PlanKind.WHOLE:
                size = Bucket(plan.tokens, plan.rows, plan.decoding)
                runner.forward(memory.batch, memory.kv_cache, size, scoring=plan.scoring)
            else:
                paused = _run_segment(runner, memory, plan, paused)
            self._done[rank] = step
            self._exchange.tell()

    def _await_memory(self, rank: int) -> RankMemory | None:
        """Return a rank's memory; None: the engine ends before it has any."""
        try:
            return self._memory[rank].result()
        except CancelledError:
            return None

    def _await_plan(self, rank: int, step: int) -> StepPlanWords:
        """Return a step's plan. There is no bound: none comes while there is no work."""
        found: list[StepPlanWords] = []

        def look() -> bool:
            plan = self._words.read(rank, step)
            if plan is not None:
                found.append(plan)
            return plan is not None

        self._exchange.wait(look, lambda: 0, bounded=False)
        return found[0]


def load_parts(config: EngineConfig, device: torch.device, dtype: torch.dtype, timeout: float) -> Followers | None:
    """Load a model in as many parts as there are to be ranks, which share the threads; None: there is to be one.

    Raises:
        ConfigError: it cannot be parted so, or not be loaded.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    return Followers(size, open_model(config.model, device, dtype).split(size), timeout)


def _run_segment(runner: Runner, memory: RankMemory, plan: StepPlanWords, before: Stream | None) -> Stream | None:
    size, layers = Bucket(plan.tokens, plan.rows, plan.decoding), range(plan.first_layer, plan.end_layer)
    return runner.forward_segment(
        memory.segmented_batch, memory.kv_cache, size, layers, memory.residual, before if plan.first_layer else None
    )
