# SPDX-License-Identifier: Apache-2.0
"""Offline inference: an engine in this process, reached through the same queue pairs as from a frontend."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from tqdm import tqdm

from blink.config import EngineConfig, FrontendConfig, ModelConfig
from blink.engine.base import Engine
from blink.engine.boot import create_engine
from blink.errors import BadRequestError, ConfigError, EngineUnavailableError, OverloadedError
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import CqeKind, FinishReason, RejectCode
from blink.sampling_params import SamplingParams
from blink.text.assets import load_assets
from blink.text.generation import FINISH_NAMES, Generation, TokenLogprob
from blink.text.prompt import Prompt, PromptRules, prepare_prompt

_TICK_SECONDS = 0.25
_START_SECONDS = 30.0
_SEED_MASK = 2**64 - 1

Message = Mapping[str, Any]


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


@dataclass(slots=True)
class _Job:
    """A sequence to generate."""

    prompt: Prompt
    params: SamplingParams
    seed: int
    generation: Generation


class LLM:
    """Load a model and generate from it; use as a context manager, or call close().

    Args:
        model: a Hugging Face directory or a .gguf file; empty for SmolLM2-135M-Instruct.
        options: fields of ModelConfig and EngineConfig, such as max_model_len or max_num_seqs.
    Raises:
        ConfigError: an option is unknown, or model and machine do not fit.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        config = _engine_config(model, options)
        self._assets = load_assets(FrontendConfig(model=config.model))
        boot: Future[Engine] = Future()
        self._thread = threading.Thread(target=_run_engine, args=(config, boot), name="blink-engine", daemon=True)
        self._thread.start()
        self._engine = boot.result()
        # In one process with the engine, silence means a busy interpreter and not a dead engine.
        self._client = EngineClient(ShmConnector(config.region), engine_timeout=60.0)
        self._next_tick = 0.0
        self._await_engine()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if self._thread.is_alive():
            self._client.close()
            self._engine.stop()
            self._thread.join()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts given as texts or token ids, in order.

        Raises:
            BadRequestError: a prompt is empty or too long.
            EngineUnavailableError: the engine failed.
        """
        return self._run(_as_list(prompts), sampling_params or SamplingParams(), use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Raises:
            BadRequestError: the model has no chat template, or it refuses the messages.
        """
        template = self._assets.chat_template
        if template is None:
            raise BadRequestError("This model has no chat template; use generate().", "messages")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [template.render(conversation) for conversation in conversations]
        return self._run(texts, sampling_params or SamplingParams(), use_tqdm, add_special_tokens=False)

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and gauges (csrc/region/layout.h: Statistics)."""
        return self._client.stats()

    def _run(
        self, sources: Sequence[str | list[int]], params: SamplingParams, use_tqdm: bool, *, add_special_tokens: bool
    ) -> list[RequestOutput]:
        info = self._client.info
        assert info is not None
        rules = PromptRules(add_special_tokens=add_special_tokens)
        prompts = [prepare_prompt(source, rules, self._assets.tokenizer, info) for source in sources]
        jobs = [job for prompt in prompts for job in self._plan(prompt, params)]
        with tqdm(total=len(jobs), desc="generating", unit="seq", disable=not use_tqdm) as progress:
            self._generate(jobs, progress)
        outputs = [_output(job.generation) for job in jobs]
        return [
            RequestOutput(
                source if isinstance(source, str) else None,
                prompt.tokens.tolist(),
                outputs[i * params.n : (i + 1) * params.n],
            )
            for i, (source, prompt) in enumerate(zip(sources, prompts, strict=True))
        ]

    def _plan(self, prompt: Prompt, params: SamplingParams) -> Iterator[_Job]:
        base = secrets.randbits(64) if params.seed is None else params.seed
        for place in range(params.n):
            generation = Generation(place, self._assets.tokenizer, params, self._assets.eos_token_ids)
            yield _Job(prompt, params, base + place & _SEED_MASK, generation)

    def _generate(self, jobs: Sequence[_Job], progress: tqdm[Any]) -> None:
        self._await_engine()  # nobody renewed the lease since the last call
        waiting = list(reversed(jobs))
        running: dict[int, _Job] = {}
        try:
            while waiting or running:
                self._submit(waiting, running)
                self._wait()
                for completion in self._client.drain():
                    self._handle(completion, running, progress)
        finally:
            for sequence in running:
                self._client.cancel(sequence)

    def _submit(self, waiting: list[_Job], running: dict[int, _Job]) -> None:
        while waiting:
            job = waiting[-1]
            try:
                sequence = self._client.submit(
                    job.prompt.tokens,
                    job.params,
                    seed=job.seed,
                    eos_token_ids=self._assets.eos_token_ids,
                    block_hashes=job.prompt.block_hashes,
                )
            except OverloadedError:
                if not running:
                    raise
                return
            running[sequence] = waiting.pop()

    def _wait(self) -> None:
        select.select([self._client], [], [], _TICK_SECONDS)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK_SECONDS
            if lost := self._client.tick():
                raise EngineUnavailableError(lost)

    def _handle(self, completion: Any, running: dict[int, _Job], progress: tqdm[Any]) -> None:
        sequence, kind = int(completion["sequence"]), completion["kind"]
        if sequence not in running:
            return
        generation = running[sequence].generation
        token, reason = int(completion["token"]), int(completion["finish_reason"])
        if kind == CqeKind.TOP_LOGPROB:
            generation.add_top_logprob(token, float(completion["logprob"]))
        elif kind == CqeKind.TOKEN:
            generation.add_token(token, float(completion["logprob"]), reason)
        elif kind == CqeKind.FINISHED:
            generation.finish(FINISH_NAMES[FinishReason(reason)])
        elif kind == CqeKind.REJECTED:
            raise BadRequestError(f"the engine refused the request: {RejectCode(token).name}")
        if generation.finish_reason:
            del running[sequence]
            progress.update()
            if not reason:  # a stop string ended it here; the engine does not know yet
                self._client.cancel(sequence)

    def _await_engine(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        self._client.tick()
        while not self._client.ready:
            self._client.tick()
            if time.monotonic() > deadline:
                raise EngineUnavailableError(self._client.unavailable_reason)
            time.sleep(0.01)


def _run_engine(config: EngineConfig, boot: Future[Engine]) -> None:
    """Create an engine and run it, on one thread: OpenMP keeps a pool for each thread that computes."""
    try:
        engine = create_engine(config)
    except BaseException as error:
        boot.set_exception(error)
        return
    boot.set_result(engine)
    engine.run()


def _engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    model_names = {field.name for field in fields(ModelConfig)}
    engine_names = {field.name for field in fields(EngineConfig)} - {"model"}
    if unknown := set(options) - model_names - engine_names:
        raise ConfigError(
            f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(sorted(model_names | engine_names))}"
        )
    model_options = {name: value for name, value in options.items() if name in model_names}
    engine_options = {name: value for name, value in options.items() if name in engine_names}
    engine_options.setdefault("region", f"llm-{os.getpid()}-{secrets.token_hex(3)}")
    return EngineConfig(model=ModelConfig(model=model, **model_options), **engine_options)


def _as_list(prompts: Any) -> list[Any]:
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def _output(generation: Generation) -> CompletionOutput:
    piece = generation.take()
    assert generation.finish_reason is not None
    return CompletionOutput(
        generation.index, piece.text, piece.tokens, piece.logprobs, generation.finish_reason, generation.stop_reason
    )
