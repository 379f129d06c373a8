# SPDX-License-Identifier: Apache-2.0
"""LLM.embed() and LLM.score(), of models that pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from blink.link.client import RegionInfo
from blink.offline.call_loop import Finish
from blink.offline.calls import Progress, Request
from blink.offline.local_engine import LocalEngine, refuse, rules_of
from blink.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from blink.region.layout import Task
from blink.request.planner import Plan
from blink.request.source import PromptType, Source, as_list, source_of
from blink.request.vectors import PoolingParams, pair_up
from blink.sampling_params import SamplingParams
from blink.text.prompt import PromptRules
from blink.text.rerank_prompt import RerankPrompts

Output = TypeVar("Output")

_NOTHING_GENERATED = SamplingParams(max_tokens=1, detokenize=False)


class PoolingCalls(ABC):
    """The methods of LLM for models that pool."""

    _engine: LocalEngine

    @abstractmethod
    def _look(self, task: Task) -> RegionInfo:
        """Return what the engine is, which must be for a task."""

    @abstractmethod
    def _requests(
        self,
        sources: Sequence[Source],
        params: SamplingParams,
        priority: int | Sequence[int] | None,
        rules: PromptRules,
    ) -> list[Request]:
        """Return the requests of a call."""

    @abstractmethod
    def _complete(
        self, requests: Sequence[Request], use_tqdm: Progress, task: Task, finish: Finish[Output]
    ) -> list[Output]:
        """Let the engine work them off, and return what is made of each when it has ended."""

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        priority: int | Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts, in order.

        Args:
            prompts: as generate() takes them.
            pooling_params: how the embeddings are to be.
            truncate_prompt_tokens: how many of a prompt's last tokens are kept; -1: as many as fit.
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens, truncation_side.
        Raises:
            BadRequestError: the model makes no embeddings, or a prompt is empty or too long.
            EngineUnavailableError: the engine failed.
        """
        refuse(lora_request=lora_request)
        engine, form = self._look(Task.EMBED), pooling_params or PoolingParams()
        form.check(engine)
        given = {"truncate_prompt_tokens": truncate_prompt_tokens, **(tokenization_kwargs or {})}
        rules = rules_of("prompt", add_special_tokens=True, given=given)
        sources = [source_of(prompt) for prompt in as_list(prompts)]
        requests = self._requests(sources, _NOTHING_GENERATED, priority, rules)

        def write(request: Request, plan: Plan) -> EmbeddingRequestOutput:
            embedding = form.embedding_of(plan.sequences[0].generation, engine).tolist()
            return EmbeddingRequestOutput(
                request.request_id, EmbeddingOutput(embedding), plan.prompts[0].tokens.tolist()
            )

        return self._complete(requests, use_tqdm, Task.EMBED, write)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs: of one query and each document, or of each query and its document.

        Args:
            data_1, data_2: queries and documents.
            pooling_params: how the scores are to be.
            truncate_prompt_tokens: tokens of a prompt at most, -1 for as many as fit: the document is cut.
            instruction: what makes a document good; None: the model's usual one.
        Raises:
            BadRequestError: the model scores nothing, or a pair is too long.
            EngineUnavailableError: the engine failed.
        """
        refuse(lora_request=lora_request)
        engine, form = self._look(Task.SCORE), pooling_params or PoolingParams()
        first, second = ([data] if isinstance(data, str) else [*data] for data in (data_1, data_2))
        make = RerankPrompts(self._engine.assets.tokenizer, instruction, engine.longest_prompt).make
        pairs = pair_up(first, second)
        sources = [Source(make(query, document, truncate=truncate_prompt_tokens)) for query, document in pairs]
        rules = rules_of("documents", add_special_tokens=False, given=None)
        requests = self._requests(sources, _NOTHING_GENERATED, None, rules)

        def write(request: Request, plan: Plan) -> ScoringRequestOutput:
            score = form.score_of(plan.sequences[0].generation, engine)
            return ScoringRequestOutput(request.request_id, ScoringOutput(score), plan.prompts[0].tokens.tolist())

        return self._complete(requests, use_tqdm, Task.SCORE, write)
