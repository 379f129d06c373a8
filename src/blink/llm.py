# SPDX-License-Identifier: Apache-2.0
"""Offline inference: an engine in this process, and vLLM's LLM class in front of it."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from blink.beam_search_params import BeamSearchParams
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.offline.absent import Absent
from blink.offline.beam_search import search_beams
from blink.offline.call_loop import CallLoop, Finish
from blink.offline.calls import Call, Progress, Request, show_progress
from blink.offline.chat_options import ChatOptions, Message
from blink.offline.controls import EngineControls
from blink.offline.description import EngineDescription, ModelDescription, describe
from blink.offline.gathered import GatheredOutput
from blink.offline.local_engine import (
    LocalEngine,
    priorities_of,
    refuse,
    rules_of,
    with_priority,
)
from blink.offline.options import EngineArgs
from blink.offline.pooling import PoolingCalls
from blink.offline.public_tokenizer import PublicTokenizer
from blink.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from blink.region.layout import Opcode, Task
from blink.request.beam_search import Tokens, position_of, scoring_params
from blink.request.planner import Plan
from blink.request.source import PromptType, Source, as_list, source_of, with_loras
from blink.request.table import Observer, SequenceTable
from blink.request.vectors import check_task
from blink.sampling_params import SamplingParams
from blink.text.generation import TokenLogprob
from blink.text.prompt import PromptRules

__all__ = ["LLM", "CompletionOutput", "Message", "RequestOutput"]


_Output = TypeVar("_Output")


class LLM(PoolingCalls, EngineControls, Absent):
    """Load a model and generate from it; calls from several threads take turns.

    Use as a context manager, or call close(); else the engine stops when the object or the process goes.

    Args:
        model: a name on the Hugging Face hub, a directory or a .gguf file; empty for SmolLM2-135M-Instruct.
        options: fields of ModelConfig and EngineConfig, such as max_model_len or max_num_seqs, or flags of vLLM.
    Raises:
        ConfigError: an option is unknown or asks for what is not done here, or model and machine do not fit.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        self._engine = LocalEngine(model, options)
        self._client, self._planner = self._engine.client, self._engine.planner
        self._finalizer = weakref.finalize(self, LocalEngine.close, self._engine)
        self._table = SequenceTable(self._client, Observer())
        self._turn = threading.Lock()
        self._loop = CallLoop(self._engine, self._table)
        self._ids = itertools.count()
        self._enqueued: list[Request] = []
        with self._turn:
            self._await_engine()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Load what the arguments name."""
        return cls(engine_args.model, **engine_args.options)

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
        use_tqdm: Progress = True,
        lora_request: object = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in order; with the model's own sampling defaults unless `sampling_params` says otherwise.

        Args:
            prompts: one or several, each as text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            sampling_params: for all prompts, or one for each.
            use_tqdm: whether a progress bar is shown, or what makes one.
            priority: of each prompt: lower runs earlier; only with the scheduling policy "priority".
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens, truncation_side.
        Raises:
            BadRequestError: a prompt is empty or too long, or the parameters do not fit the model.
            EngineUnavailableError: the engine failed.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        requests = self._prompts(prompts, sampling_params, priority, tokenization_kwargs, lora_request)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: object = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            chat_template: the text of another template for this call.
            chat_template_content_format: taken; the template's own traits decide how it gets contents.
            tools: functions in OpenAI's form that the template shows; calls stay in the text, as the model writes them.
        Raises:
            BadRequestError: the model has no chat template, or it refuses the messages.
        """
        options = ChatOptions(
            lora_request, priority, chat_template, chat_template_content_format, add_generation_prompt,
            continue_final_message, tools, chat_template_kwargs, tokenization_kwargs, mm_processor_kwargs,
        )  # fmt: skip
        return self._run(self._chats(messages, sampling_params, options), use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Keep prompts for wait_for_completion(); return their request ids.

        Raises:
            BadRequestError: as in generate(), where that does not need the engine.
        """
        return self._enqueue(self._prompts(prompts, sampling_params, priority, tokenization_kwargs))

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        **options: Any,
    ) -> list[str]:
        """Keep conversations for wait_for_completion(); return their request ids. The options are chat()'s.

        Raises:
            BadRequestError: as in chat(), where that does not need the engine.
        """
        del use_tqdm
        return self._enqueue(self._chats(messages, sampling_params, ChatOptions(**options)))

    def wait_for_completion(self, output_type: object = None, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """Complete what was enqueued, in order; output_type is taken: all outputs have one type."""
        del output_type
        requests, self._enqueued = self._enqueued, []
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: object = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest sequences of each prompt; their texts begin with the prompt's.

        Args:
            concurrency_limit: taken; the engine's own limits hold.
        Raises:
            BadRequestError: a prompt and params.max_tokens do not fit into the context.
        """
        del concurrency_limit
        refuse(lora_request=lora_request, priority=priority)
        longest = SamplingParams(max_tokens=params.max_tokens)
        rules = rules_of("prompt", add_special_tokens=True, given=None)
        with self._turn:
            engine = self._await_engine()
            prompt_tokens = [
                self._engine.plan(source_of(prompt), longest, rules, engine).prompts[0].tokens
                for prompt in as_list(prompts)
            ]

        sampling = scoring_params(params)
        with show_progress(use_tqdm, params.max_tokens, "tok") as progress:

            def score(sequences: list[Tokens]) -> list[TokenLogprob]:
                sources = [Source(tokens) for tokens in sequences]
                requests = self._requests(sources, sampling, None, rules)
                found = self._complete(requests, False, Task.GENERATE, lambda _, plan: plan.sequences[0].generation)
                progress.update()
                return [position_of(generation) for generation in found]

            return search_beams(prompt_tokens, params, self._engine.assets, score)

    def get_tokenizer(self) -> PublicTokenizer:
        """Return the model's tokenizer with the methods of transformers' that scripts call."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling defaults."""
        return self._engine.default_params

    @property
    def llm_engine(self) -> EngineDescription:
        """Return what vLLM's engine tells of itself: model_config, cache_config, scheduler_config."""
        with self._turn:
            return describe(self._engine, self._await_engine())

    @property
    def model_config(self) -> ModelDescription:
        """Return what the model is."""
        return self.llm_engine.model_config

    def get_world_size(self) -> int:
        """Return the number of devices."""
        return 1

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return True when it is empty."""
        with self._turn:
            self._await_engine()
            before = self._client.stats()["prefix_resets"]
            self._client.order(Opcode.RESET_PREFIX_CACHE)
            while self._client.stats()["prefix_resets"] == before:
                self._await_engine()
                time.sleep(0.001)
        return True

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and gauges (csrc/region/layout.h: Statistics)."""
        return self._client.stats()

    def _prompts(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        tokenization: Mapping[str, Any] | None,
        lora_request: object = None,
    ) -> list[Request]:
        sources = with_loras([source_of(prompt) for prompt in as_list(prompts)], lora_request)
        return self._requests(
            sources, params, priority, rules_of("prompt", add_special_tokens=True, given=tokenization)
        )

    def _chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> list[Request]:
        sources = with_loras(options.sources(messages, self._engine.assets), options.lora_request)
        return self._requests(sources, params, options.priority, options.rules)

    def _enqueue(self, requests: Sequence[Request]) -> list[str]:
        self._enqueued += requests
        return [request.request_id for request in requests]

    def _requests(
        self,
        sources: Sequence[Source],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        rules: PromptRules,
    ) -> list[Request]:
        each = self._engine.default_params if params is None else params
        chosen = [each] * len(sources) if isinstance(each, SamplingParams) else each
        if len(chosen) != len(sources):
            raise BadRequestError(f"{len(sources)} prompts need as many sampling_params, got {len(chosen)}.")
        priorities = priorities_of(priority, len(sources))
        return [
            Request(str(next(self._ids)), source, with_priority(own, order), rules)
            for source, own, order in zip(sources, chosen, priorities, strict=True)
        ]

    def _run(self, requests: Sequence[Request], use_tqdm: Progress) -> list[RequestOutput]:
        tokenizer = self._engine.assets.tokenizer

        def take(one: Request, plan: Plan) -> RequestOutput:
            return GatheredOutput(one.request_id, one.source, plan, tokenizer).take()

        return self._complete(requests, use_tqdm, Task.GENERATE, take)

    def _look(self, task: Task) -> RegionInfo:
        with self._turn:
            engine = self._await_engine()
        check_task(task, engine)
        return engine

    def _complete(
        self, requests: Sequence[Request], use_tqdm: Progress, task: Task, finish: Finish[_Output]
    ) -> list[_Output]:
        with self._turn:
            engine = self._await_engine()  # nobody renewed the lease since the last call

            def plan(one: Request) -> Plan:
                return self._engine.plan(one.source, one.params, one.rules, engine, task)

            with show_progress(use_tqdm, sum(one.params.n for one in requests), "seq") as progress:
                return self._loop.run(requests, plan, Call(self._table, progress), finish)

    def _await_engine(self) -> RegionInfo:
        return self._engine.await_ready()
