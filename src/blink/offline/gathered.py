# SPDX-License-Identifier: Apache-2.0
"""The outputs of one request, gathered from what its sequences gain."""

from __future__ import annotations

from dataclasses import dataclass, field

from blink.outputs import CompletionOutput, PositionLogprobs, RequestOutput, logprobs_of
from blink.request.planner import Plan
from blink.request.source import Source
from blink.sampling_params import RequestOutputKind
from blink.text.tokenizer import Tokenizer, without_marks


@dataclass(slots=True)
class _Gain:
    """What a sequence has gained: since the beginning, or since it was told last."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    logprob: float = 0.0  # of all tokens since the beginning


class GatheredOutput:
    """The output of one prompt's sequences as it grows."""

    def __init__(self, request_id: str, source: Source, plan: Plan, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self._lora_request = source.lora_request
        self.generations = [planned.generation for planned in plan.sequences]
        self._params = plan.sequences[0].params
        self._tokenizer = tokenizer
        self._prompt = without_marks(source.prompt) if isinstance(source.prompt, str) else source.text
        self._prompt_tokens: list[int] = plan.prompts[0].tokens.tolist()
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._gains = [_Gain() for _ in self.generations]
        self._ended: set[int] = set()  # whose end was told, with DELTA

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the sequences have together."""
        return sum(generation.num_tokens for generation in self.generations)

    @property
    def is_finished(self) -> bool:
        """Say whether all sequences have ended."""
        return all(generation.finish_reason is not None for generation in self.generations)

    def take(self) -> RequestOutput:
        """Return the output as it is now; with output_kind DELTA, what is new and the sequences that have it."""
        is_delta = self._params.output_kind is RequestOutputKind.DELTA
        outputs = [self._output(place, is_delta=is_delta) for place in range(len(self.generations))]
        if is_delta:
            ended = {output.index for output in outputs if output.finished()} - self._ended
            self._ended |= ended
            outputs = [output for output in outputs if output.token_ids or output.text or output.index in ended]
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_tokens,
            self._scores(),
            outputs,
            self.is_finished,
            lora_request=self._lora_request,
            num_cached_tokens=self.generations[0].cached_tokens,
        )

    def _output(self, place: int, *, is_delta: bool) -> CompletionOutput:
        generation, gain = self.generations[place], self._gains[place]
        delta = generation.take()
        if is_delta:
            gain = self._gains[place] = _Gain(logprob=gain.logprob)
        gain.text += delta.text
        gain.tokens += delta.tokens
        is_ranked = not self._params.logprob_token_ids
        gain.logprobs += [logprobs_of(self._tokenizer, entry, is_ranked=is_ranked) for entry in delta.logprobs]
        gain.logprob += sum(entry.logprob for entry in delta.logprobs)
        has_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            generation.index,
            gain.text,
            list(gain.tokens),
            gain.logprob if has_logprobs else None,
            list(gain.logprobs) if has_logprobs else None,
            generation.finish_reason,
            generation.stop_reason,
            self._lora_request,
        )

    def _scores(self) -> list[PositionLogprobs | None] | None:
        if self._params.prompt_logprobs is None:
            return None
        entries = self.generations[0].prompt_logprobs
        if self._prompt_logprobs is None or len(self._prompt_logprobs) <= len(entries):
            self._prompt_logprobs = [None, *(logprobs_of(self._tokenizer, entry) for entry in entries)]
        return self._prompt_logprobs
