# SPDX-License-Identifier: Apache-2.0
"""Offline inference: an engine in this process, reached through the same queue pairs as from a frontend."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from tqdm import tqdm

from blink.config import EngineConfig, FrontendConfig, ModelConfig
from blink.engine.thread import EngineThread
from blink.errors import BadRequestError, BlinkError, ConfigError, EngineUnavailableError, OverloadedError
from blink.hub.localize import localize
from blink.link.client import EngineClient, RegionInfo
from blink.link.shm import ShmConnector
from blink.request.planner import Plan, PlannedSequence, Planner, Rendering
from blink.request.source import PromptType, Source, as_list, source_of
from blink.request.table import Observer, SequenceTable
from blink.sampling_params import SamplingParams
from blink.text.assets import load_assets
from blink.text.generation import Generation, TokenLogprob
from blink.text.prompt import PromptRules
from blink.text.tokenizer import without_marks
from blink.vllm.options import to_own_options

_TICK_SECONDS = 0.25
_START_SECONDS = 30.0


Message = Mapping[str, Any]  # JSON: roles, contents and whatever else the template reads


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All sequences of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob]  # of the second token of the prompt and those behind it, if asked for


class LLM:
    """Load a model and generate from it; calls from several threads take turns.

    Use as a context manager, or call close(); else the engine stops when the object or the process goes.

    Args:
        model: a name on the Hugging Face hub, a directory or a .gguf file; empty for SmolLM2-135M-Instruct.
        options: fields of ModelConfig and EngineConfig, such as max_model_len or max_num_seqs, or flags of vLLM.
    Raises:
        ConfigError: an option is unknown or asks for what is not done here, or model and machine do not fit.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        config = _engine_config(model, options)
        config = replace(config, model=localize(config.model))
        self._assets = load_assets(FrontendConfig(model=config.model))
        self._planner = Planner(self._assets)
        engine = EngineThread(config)
        # In one process with the engine, silence means a busy interpreter and not a dead engine.
        self._client = EngineClient(ShmConnector(config.region), engine_timeout=60.0)
        self._finalizer = weakref.finalize(self, _shut_down, self._client, engine)
        self._table = SequenceTable(self._client, Observer())
        self._turn = threading.Lock()
        self._next_tick = 0.0
        with self._turn:
            self._await_engine()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running calls, stop the engine and free its memory."""
        with self._turn:
            self._finalizer()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, in order; with the model's own sampling defaults unless `sampling_params` says otherwise.

        Args:
            prompts: one or several, each as text, token ids or {"prompt": ...} or {"prompt_token_ids": ...}.
            sampling_params: for all prompts, or one for each.
        Raises:
            BadRequestError: a prompt is empty or too long, or the parameters do not fit the model.
            EngineUnavailableError: the engine failed.
        """
        sources = [source_of(prompt) for prompt in as_list(prompts)]
        return self._run(sources, sampling_params, use_tqdm, "prompt", add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            tools: functions in OpenAI's form that the template shows; calls stay in the text, as the model writes them.
        Raises:
            BadRequestError: the model has no chat template, or it refuses the messages.
        """
        rendering = Rendering(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**(chat_template_kwargs or {}), "tools": tools},
        )
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        sources = [Source(self._planner.render(conversation, rendering)) for conversation in conversations]
        return self._run(sources, sampling_params, use_tqdm, "messages", add_special_tokens=False)

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and gauges (csrc/region/layout.h: Statistics)."""
        return self._client.stats()

    def _run(
        self,
        sources: Sequence[Source],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        param: str,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        each = self._params_of_each(params, len(sources))
        with self._turn:
            engine = self._await_engine()  # nobody renewed the lease since the last call
            plans: list[Plan] = []
            for source, chosen in zip(sources, each, strict=True):
                rules = PromptRules(add_special_tokens=add_special_tokens, cache_salt=source.cache_salt, param=param)
                plans.append(self._planner.plan_now([source.prompt], chosen, rules, engine))
            self._await_engine()  # nor while these were planned
            sequences = [planned for plan in plans for planned in plan.sequences]
            with tqdm(total=len(sequences), desc="generating", unit="seq", disable=not use_tqdm) as progress:
                self._generate(sequences, _Call(self._table, progress))
        return [_output(source, plan) for source, plan in zip(sources, plans, strict=True)]

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams(**cast("dict[str, Any]", self._assets.sampling_defaults))
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise BadRequestError(f"{num_prompts} prompts need as many sampling_params, got {len(params)}.")
        return params

    def _generate(self, sequences: Sequence[PlannedSequence], call: _Call) -> None:
        waiting = list(reversed(sequences))
        try:
            while waiting or self._table.num_open:  # also what an interrupt has kept from being noted
                self._submit(waiting, call)
                self._wait()
                self._table.drain()
                if call.error is not None:
                    raise call.error
        finally:
            call.cancel("abort")

    def _submit(self, waiting: list[PlannedSequence], call: _Call) -> None:
        while waiting:
            try:
                call.submitted.append(self._table.submit(call, waiting[-1]))
            except OverloadedError:
                # Those of an interrupted call may still be leaving.
                if not self._client.stats().get("worker_sequences"):
                    raise
                return
            waiting.pop()

    def _wait(self) -> None:
        select.select([self._client], [], [], _TICK_SECONDS)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK_SECONDS
            self._table.tick()

    def _await_engine(self) -> RegionInfo:
        if not self._finalizer.alive:
            raise EngineUnavailableError("This LLM is closed.")
        deadline = time.monotonic() + _START_SECONDS
        self._client.tick()
        while not self._client.ready:
            self._client.tick()
            if time.monotonic() > deadline:
                raise EngineUnavailableError(self._client.unavailable_reason)
            time.sleep(0.01)
        assert self._client.info is not None
        return self._client.info


class _Call:
    """One call's sequences: the owner of them all in the table."""

    def __init__(self, table: SequenceTable, progress: tqdm[Any]) -> None:
        self.arrived = time.perf_counter()
        self.flow = 0
        self.submitted: list[int] = []
        self.error: BlinkError | None = None
        self._table = table
        self._progress = progress

    def note_change(self, generation: Generation) -> None:
        """Move the progress bar when a sequence has ended."""
        if generation.finish_reason is not None:
            self._progress.update()

    def flush(self) -> None:
        """Leave the output with the sequences: it is taken at the end."""

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """Keep the error for the caller and cancel what is open."""
        self.error = self.error or error
        self.cancel(reason)

    def cancel(self, reason: str) -> None:
        """Take what is open away from the engine."""
        for sequence in self.submitted:
            self._table.cancel(sequence, reason)
        self.submitted.clear()


def _shut_down(client: EngineClient, engine: EngineThread) -> None:
    """Stop an engine. Must not hold its LLM: also called when that is collected, and at the process's exit."""
    client.close()
    engine.stop()


def _engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    model_names = {field.name for field in fields(ModelConfig)}
    engine_names = {field.name for field in fields(EngineConfig)} - {"model"}
    options = to_own_options(options, model_names | engine_names)
    if unknown := set(options) - model_names - engine_names:
        raise ConfigError(
            f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(sorted(model_names | engine_names))}"
        )
    model_options = {name: value for name, value in options.items() if name in model_names}
    engine_options = {name: value for name, value in options.items() if name in engine_names}
    engine_options.setdefault("region", f"llm-{os.getpid()}-{secrets.token_hex(3)}")
    return EngineConfig(model=ModelConfig(model=model, **model_options), **engine_options)


def _output(source: Source, plan: Plan) -> RequestOutput:
    text = without_marks(source.prompt) if isinstance(source.prompt, str) else None
    outputs = [_completion(planned.generation) for planned in plan.sequences]
    scores = plan.sequences[0].generation.prompt_logprobs
    return RequestOutput(text, plan.prompts[0].tokens.tolist(), outputs, scores)


def _completion(generation: Generation) -> CompletionOutput:
    delta = generation.take()
    assert generation.finish_reason is not None
    return CompletionOutput(
        generation.index, delta.text, delta.tokens, delta.logprobs, generation.finish_reason, generation.stop_reason
    )
