# SPDX-License-Identifier: Apache-2.0
"""An engine in this process for asyncio: each request is a stream of outputs."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, OverloadedError
from blink.link.client import RegionInfo
from blink.lora_request import read_lora
from blink.offline.absent import Absent
from blink.offline.async_controls import AsyncControls
from blink.offline.description import ModelDescription, describe
from blink.offline.gathered import GatheredOutput
from blink.offline.local_engine import (
    START_SECONDS,
    TICK_SECONDS,
    LocalEngine,
    rules_of,
    with_priority,
)
from blink.offline.options import EngineArgs
from blink.offline.public_tokenizer import PublicTokenizer
from blink.outputs import RequestOutput
from blink.region.layout import Opcode
from blink.request.planner import PlannedSequence
from blink.request.source import PromptType, source_of
from blink.request.table import Observer, SequenceTable
from blink.sampling_params import RequestOutputKind, SamplingParams
from blink.text.generation import Generation

_LOOK_SECONDS = 0.005


class AsyncLLM(AsyncControls, Absent):
    """Load a model and stream from it. Use from one event loop at a time.

    Use as an asynchronous context manager, or call shutdown(); else the engine stops when the object or the process
    goes.

    Args:
        model: as LLM's.
        options: as LLM's.
    Raises:
        ConfigError: an option is unknown or asks for what is not done here, or model and machine do not fit.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        self._engine = LocalEngine(model, options, waits_when_paused=True)
        self._finalizer = weakref.finalize(self, LocalEngine.close, self._engine)
        self._table = SequenceTable(self._engine.client, Observer())
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Load what the arguments name."""
        return cls(engine_args.model, **engine_args.options)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: object = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: object = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yield its output as it grows, the last one with `finished`.

        Args:
            prompt: as text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            sampling_params: None for the model's own defaults; output_kind says what each output holds.
            request_id: names the request for abort(); empty: nobody needs it.
            priority: lower runs earlier; only with the scheduling policy "priority".
        Raises:
            BadRequestError: the prompt or the parameters do not fit, or a request of this id runs.
            EngineUnavailableError: the engine failed.
        """
        del trace_headers
        if request_id in self._streams:
            raise BadRequestError(f"Request id {request_id} is running already.", "request_id")
        params = with_priority(sampling_params or self._engine.default_params, priority)
        rules = rules_of("prompt", add_special_tokens=True, given=tokenization_kwargs)
        source = replace(source_of(prompt), lora_request=read_lora(lora_request))
        stream = _Stream(self._table, params)
        self._streams[request_id or f"unnamed-{id(stream)}"] = stream
        try:
            info = await self._await_engine()
            plan = await asyncio.to_thread(self._engine.plan, source, params, rules, info)
            gathered = GatheredOutput(request_id, source, plan, self._engine.assets.tokenizer)
            stream.begin(gathered, plan.sequences)
            await self._submit(stream, plan.sequences)
            while not stream.is_over:
                await stream.wait()
                if stream.is_due:
                    yield stream.take()
        finally:
            stream.cancel("abort")
            self._streams = {name: each for name, each in self._streams.items() if each is not stream}

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with what they have, and the finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._streams:
                self._streams[name].abort()

    async def get_tokenizer(self) -> PublicTokenizer:
        """Return the model's tokenizer with the methods of transformers' that scripts call."""
        return self._engine.tokenizer

    async def get_model_config(self) -> ModelDescription:
        """Return what the model is."""
        return describe(self._engine, await self._await_engine()).model_config

    async def check_health(self) -> None:
        """Return if the engine works.

        Raises:
            EngineUnavailableError: it does not.
        """
        await self._await_engine()

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return True when it is empty."""
        await self._await_engine()
        client = self._engine.client
        before = client.stats()["prefix_resets"]
        client.order(Opcode.RESET_PREFIX_CACHE)
        while client.stats()["prefix_resets"] == before:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._await_engine()
        return True

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling defaults."""
        return self._engine.default_params

    @property
    def is_running(self) -> bool:
        """Say whether the engine was not shut down."""
        return not self._engine.is_closed

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and gauges (csrc/region/layout.h: Statistics)."""
        return self._engine.client.stats()

    def shutdown(self) -> None:
        """End all streams, stop the engine and free its memory."""
        self._table.fail_all(EngineUnavailableError("This LLM is closed."))
        self._leave_loop()
        self._finalizer()

    async def _submit(self, stream: _Stream, sequences: list[PlannedSequence]) -> None:
        for planned in sequences:
            while planned.generation.finish_reason is None:  # else it was aborted
                try:
                    stream.submitted.append(self._table.submit(stream, planned))
                    break
                except OverloadedError:
                    if not self._engine.client.stats().get("worker_sequences"):
                        raise
                    await asyncio.sleep(_LOOK_SECONDS)

    async def _await_engine(self) -> RegionInfo:
        self._enter_loop(asyncio.get_running_loop())
        deadline = time.monotonic() + START_SECONDS
        while not self._engine.look():
            if time.monotonic() > deadline:
                raise EngineUnavailableError(self._engine.client.unavailable_reason)
            await asyncio.sleep(_LOOK_SECONDS)
        return self._engine.info

    def _enter_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop look after the engine from now on."""
        if self._loop is loop or self._engine.is_closed:
            return
        self._leave_loop()
        self._loop = loop
        loop.add_reader(self._engine.client.fileno(), self._table.drain)
        _tick(weakref.ref(self))

    def _leave_loop(self) -> None:
        loop, self._loop = self._loop, None
        if self._timer is not None:
            self._timer.cancel()
        if loop is not None and not loop.is_closed() and not self._engine.is_closed:
            loop.remove_reader(self._engine.client.fileno())

    def keep(self) -> None:
        """Renew the lease now, and again in a quarter of a second."""
        if self._loop is not None and not self._engine.is_closed:
            self._table.tick()
            self._timer = self._loop.call_later(TICK_SECONDS, partial(_tick, weakref.ref(self)))


def _tick(of: weakref.ref[AsyncLLM]) -> None:
    """Keep an engine's lease as long as somebody holds it."""
    found = of()
    if found is not None:
        found.keep()


AsyncLLMEngine = AsyncLLM  # vLLM's older name


class _Stream:
    """One request: the owner of its sequences in the table, and what its consumer waits for."""

    def __init__(self, table: SequenceTable, params: SamplingParams) -> None:
        self.arrived = time.perf_counter()
        self.flow = 0
        self.submitted: list[int] = []
        self.is_over = False  # its last output was taken
        self._table = table
        self._is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._interval = params.stream_interval or 1
        self._gathered: GatheredOutput | None = None
        self._error: BlinkError | None = None
        self._news = asyncio.Event()
        self._told = 0  # tokens at the last output

    def begin(self, gathered: GatheredOutput, sequences: list[PlannedSequence]) -> None:
        """Take over what the request's sequences gain; end them where it was aborted before."""
        self._gathered = gathered
        if self._news.is_set():
            for planned in sequences:
                planned.generation.finish("abort")

    @property
    def is_due(self) -> bool:
        """Say whether the consumer is to see what there is."""
        gathered = self._gathered
        assert gathered is not None
        if gathered.is_finished:
            return True
        gained = gathered.num_tokens - self._told
        return not self._is_final_only and gained > 0 and (self._told == 0 or gained >= self._interval)

    async def wait(self) -> None:
        """Return when the sequences have gained something.

        Raises:
            BlinkError: the request failed.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    def take(self) -> RequestOutput:
        """Return the output as it is now."""
        assert self._gathered is not None
        self._told = self._gathered.num_tokens
        output = self._gathered.take()
        self.is_over = output.finished
        return output

    def abort(self) -> None:
        """End the sequences where they are."""
        self.cancel("abort")
        for generation in self._gathered.generations if self._gathered is not None else ():
            if generation.finish_reason is None:
                generation.finish("abort")
        self._news.set()

    def note_change(self, generation: Generation) -> None:
        """Leave the output with the sequence until the consumer asks."""

    def flush(self) -> None:
        """Wake the consumer."""
        self._news.set()

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """Keep the error for the consumer and cancel what is open."""
        self._error = self._error or error
        self.cancel(reason)
        self._news.set()

    def cancel(self, reason: str) -> None:
        """Take what is open away from the engine."""
        for sequence in self.submitted:
            self._table.cancel(sequence, reason)
        self.submitted.clear()
