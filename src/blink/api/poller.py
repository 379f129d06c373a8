# SPDX-License-Identifier: Apache-2.0
"""The one place that reads completions: drains the queue pair in batches and hands each token to its request.

It runs as a callback of the event loop: no task, future or lock per token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from blink.api import metrics as names
from blink.api.metrics import Metrics
from blink.errors import BlinkError, EngineUnavailableError, OverloadedError
from blink.link.client import EngineClient
from blink.region.layout import CqeKind, FinishReason, RejectCode
from blink.sampling_params import SamplingParams
from blink.text.generation import FINISH_NAMES, Generation
from blink.text.prompt import Prompt

_TICK_SECONDS = 0.25
_FIELDS = ("sequence", "token", "logprob", "time_ns", "kind", "finish_reason")
_ADMITTED, _TOKEN, _TOP_LOGPROB = int(CqeKind.ADMITTED), int(CqeKind.TOKEN), int(CqeKind.TOP_LOGPROB)
_FINISHED, _REJECTED = int(CqeKind.FINISHED), int(CqeKind.REJECTED)

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The request behind a sequence."""

    arrived: float

    def note_change(self, generation: Generation) -> None:
        """Remember that a sequence has grown or ended."""
        ...

    def flush(self) -> None:
        """Pass on what has changed since the last call."""
        ...

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """End the request with an error."""
        ...


class _Running:
    """A sequence that the engine has: whose it is and when it did what (seconds, time.perf_counter)."""

    __slots__ = ("admitted", "first", "generation", "last_ns", "num_prompt_tokens", "owner")

    def __init__(self, owner: Owner, generation: Generation, num_prompt_tokens: int) -> None:
        self.owner = owner
        self.generation = generation
        self.num_prompt_tokens = num_prompt_tokens
        self.admitted: float | None = None
        self.first: float | None = None
        self.last_ns = 0


class Poller:
    """Own the engine client and the table of sequences. Use from the event loop only."""

    def __init__(self, client: EngineClient, metrics: Metrics, max_waiting: int) -> None:
        self.client = client
        self.metrics = metrics
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._table: dict[int, _Running] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_sequences(self) -> int:
        """Return how many sequences of this worker are with the engine."""
        return len(self._table)

    def start(self) -> None:
        """Watch the completion queue and the engine from now on."""
        asyncio.get_running_loop().add_reader(self.client.fileno(), self._poll)
        self._tick()

    def stop(self) -> None:
        """Stop watching and give the queue pair back."""
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self.client.fileno())
        self.client.close()

    def check_room(self, num_sequences: int) -> None:
        """Refuse a request that would exceed the limit of waiting sequences.

        Raises:
            OverloadedError: too many sequences wait.
        """
        if self._max_waiting and self._num_waiting + num_sequences > self._max_waiting:
            raise OverloadedError(f"The queue is full: {self._num_waiting} sequences wait already. Retry later.")

    def submit(
        self,
        owner: Owner,
        generation: Generation,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        eos_token_ids: tuple[int, ...],
    ) -> int:
        """Give a sequence to the engine; return its id.

        Raises:
            OverloadedError: the queue pair is full.
        """
        sequence = self.client.submit(
            prompt.tokens, params, seed=seed, eos_token_ids=eos_token_ids, block_hashes=prompt.block_hashes
        )
        self._table[sequence] = _Running(owner, generation, prompt.num_tokens)
        self._num_waiting += 1
        return sequence

    def cancel(self, sequence: int, reason: str) -> None:
        """Take a sequence away from the engine, if it still has it."""
        if sequence in self._table:
            self._remove(sequence, reason)
            self.client.cancel(sequence)

    def fail_all(self, error: BlinkError) -> None:
        """End all requests with an error."""
        for owner in {running.owner: None for running in list(self._table.values())}:
            owner.fail(error)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        was_ready, lost = self.client.ready, self.client.tick()
        if lost is not None:
            logger.error("%s: %d open sequences fail", lost, len(self._table))
            self.fail_all(EngineUnavailableError(f"The request was lost: {lost}."))
        if self.client.ready and self.client.info is not None and (lost is not None or not was_ready):
            self.metrics.model_name = self.metrics.model_name or self.client.info.model
            logger.info("connected to the engine of %s", self.client.info.model)

    def _poll(self) -> None:
        rows = self.client.drain()
        owners: dict[Owner, None] = {}
        for sequence, token, logprob, time_ns, kind, reason in zip(
            *(rows[name].tolist() for name in _FIELDS), strict=True
        ):
            running = self._table.get(sequence)
            if running is None:  # cancelled: its last completions are nobody's
                continue
            owners[running.owner] = None
            try:
                self._handle(sequence, running, token, logprob, time_ns, kind, reason)
            except Exception as error:
                logger.exception("a completion could not be handled")
                running.owner.fail(BlinkError(f"Internal error: {type(error).__name__}."))
        for owner in owners:
            try:
                owner.flush()
            except Exception as error:
                logger.exception("a response could not be written")
                owner.fail(BlinkError(f"Internal error: {type(error).__name__}."))

    def _handle(
        self, sequence: int, running: _Running, token: int, logprob: float, time_ns: int, kind: int, reason: int
    ) -> None:
        if kind == _TOKEN:
            self._add_token(sequence, running, token, logprob, time_ns, reason)
        elif kind == _TOP_LOGPROB:
            running.generation.add_top_logprob(token, logprob)
        elif kind == _ADMITTED:
            self._note_admission(running, token)
        elif kind == _FINISHED:
            running.generation.finish(FINISH_NAMES[FinishReason(reason)] if reason else "abort")
            self._remove(sequence, running.generation.finish_reason or "abort")
            running.owner.note_change(running.generation)
        elif kind == _REJECTED:
            self._remove(sequence, "error")
            running.owner.fail(_rejection(token))

    def _add_token(
        self, sequence: int, running: _Running, token: int, logprob: float, time_ns: int, reason: int
    ) -> None:
        generation = running.generation
        if running.first is None:
            running.first = time.perf_counter()
            self.metrics.observe(names.TTFT, running.first - running.owner.arrived)
        else:
            self.metrics.observe(names.ITL, (time_ns - running.last_ns) * 1e-9)
        running.last_ns = time_ns
        generation.add_token(token, logprob, reason)
        running.owner.note_change(generation)
        if generation.finish_reason is not None:
            self._remove(sequence, generation.finish_reason)
            if not reason:  # a stop string: the engine does not know yet
                self.client.cancel(sequence)

    def _note_admission(self, running: _Running, cached_tokens: int) -> None:
        if running.admitted is None:  # after a preemption it is admitted again
            running.admitted = time.perf_counter()
            running.generation.cached_tokens = cached_tokens
            self._num_waiting -= 1
            self.metrics.observe(names.QUEUE, running.admitted - running.owner.arrived)

    def _remove(self, sequence: int, reason: str) -> None:
        running = self._table.pop(sequence)
        if running.admitted is None:
            self._num_waiting -= 1
        self.metrics.count_finished(reason)
        now = time.perf_counter()
        observe, num_tokens = self.metrics.observe, running.generation.num_tokens
        observe(names.E2E, now - running.owner.arrived)
        observe(names.PROMPT_TOKENS, running.num_prompt_tokens)
        observe(names.GENERATION_TOKENS, num_tokens)
        if running.admitted is not None:
            observe(names.INFERENCE, now - running.admitted)
        if running.first is not None:
            observe(names.PREFILL, running.first - (running.admitted or running.owner.arrived))
            observe(names.DECODE, now - running.first)
            if num_tokens > 1:
                observe(names.TPOT, (now - running.first) / (num_tokens - 1))


def _rejection(code: int) -> BlinkError:
    if code == RejectCode.DRAINING:
        return EngineUnavailableError("The engine is shutting down.")
    return BlinkError(f"The engine rejected the request: {RejectCode(code).name}.")
