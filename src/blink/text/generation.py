# SPDX-License-Identifier: Apache-2.0
"""The output of one sequence: its tokens become text, stop strings end it, logprobs are kept with it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blink.region.layout import CONSTANTS, FinishReason
from blink.sampling_params import SamplingParams
from blink.text.detokenizer import Detokenizer, Tokens
from blink.text.message.parser import MessageForm
from blink.text.message.passages import Passages
from blink.text.stop_strings import StopMatcher
from blink.text.tokenizer import Tokenizer

Vector = npt.NDArray[np.float32]
_NO_VECTOR = np.zeros(0, np.float32)
_STOP = int(FinishReason.STOP)
FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class TokenLogprob(NamedTuple):
    """The logprob of a sampled token, and the most likely tokens in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Delta(NamedTuple):
    """What a sequence has gained since it was last asked."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]


class Times(NamedTuple):
    """When a sequence went from one state to the next; seconds, time.perf_counter. None: it never did."""

    arrived: float
    admitted: float | None
    first: float | None  # token
    ended: float


class Generation:
    """One growing sequence; `index` is its place among the choices of the response."""

    __slots__ = (
        "_detokenizer",
        "_eos",
        "_has_logprobs",
        "_has_text",
        "_is_empty",
        "_logprobs",
        "_matcher",
        "_open_detokenizer",
        "_params",
        "_passages",
        "_texts",
        "_tokens",
        "_top",
        "cached_tokens",
        "finish_reason",
        "index",
        "num_tokens",
        "predicted",
        "prompt_logprobs",
        "reasoning_tokens",
        "stop_reason",
        "times",
        "vector",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: tuple[int, ...],
        before: Tokens = (),
        form: MessageForm | None = None,
    ) -> None:
        """Begin behind the prompt `before`; `form` says how the text is read, where stop strings must spare calls."""
        self.index = index
        self.num_tokens = 0
        self.cached_tokens = 0
        self.predicted = (0, 0)  # tokens of a prediction that were accepted, and rejected
        self.reasoning_tokens = 0  # whoever reads the text as a message counts them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.times: Times | None = None  # when it has ended
        self.vector: Vector = _NO_VECTOR  # what the prompt became, where the engine pools
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt's second token and those behind it
        self._params = params
        self._is_empty, self._has_text = params.max_tokens == 0, params.detokenize
        self._has_logprobs = params.logprobs is not None
        self._eos = () if params.ignore_eos else eos_token_ids
        self._detokenizer: Detokenizer | None = None
        self._open_detokenizer = partial(
            tokenizer.open_detokenizer,
            skip_special_tokens=params.skip_special_tokens,
            marks=params.token_marks,
            before=before,
        )
        self._matcher = StopMatcher(params.stops, include=params.include_stop_str_in_output) if params.stops else None
        has_calls = form is not None and (form.calls is not None or form.uses_harmony)
        self._passages = Passages(form) if form is not None and has_calls and params.stops else None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._top: list[tuple[int, float]] = []

    def open(self) -> Detokenizer:
        """Look at the end of the prompt before the first token comes: best while the engine works on it."""
        self._detokenizer = self._open_detokenizer()
        return self._detokenizer

    def add_values(self, place: int, values: Vector) -> None:
        """Append a part of the vector, which begins at a place of it.

        Raises:
            ValueError: another part should come.
        """
        if place != len(self.vector):
            raise ValueError(f"values of place {place} come behind {len(self.vector)}")
        self.vector = np.concatenate((self.vector, values))

    def add_top_logprob(self, token: int, logprob: float) -> None:
        """Note one of the most likely tokens in the place of the next token."""
        self._top.append((token, logprob))

    def add_prompt_logprob(self, token: int, logprob: float) -> None:
        """Note the logprob of the prompt's next token, whose rivals were noted before."""
        self.prompt_logprobs.append(TokenLogprob(token, logprob, self._top))
        self._top = []

    def note_prediction(self, rank: int) -> None:
        """Count what became of the prediction at the next token, as its completion tells by a rank that is not 0."""
        accepted, rejected = self.predicted
        is_accepted = rank == CONSTANTS["accepted_rank"]
        self.predicted = accepted + is_accepted, rejected + rank - CONSTANTS["accepted_rank"]

    def add_token(self, token: int, logprob: float, reason: int) -> None:
        """Append a token; afterwards `finish_reason` says whether the sequence has ended."""
        if self._is_empty:
            self.finish(FINISH_NAMES[FinishReason.LENGTH])
            return
        self.num_tokens += 1
        self._tokens.append(token)
        if self._has_logprobs:
            self._logprobs.append(TokenLogprob(token, logprob, self._top))
            self._top = []
        # The token that ends a sequence is no part of its text, unless the client wants to see it.
        has_text = reason != _STOP or self._params.include_stop_str_in_output
        if has_text and self._has_text:
            self._add_text((self._detokenizer or self.open()).push(token))
        if reason and self.finish_reason is None:
            if reason == _STOP and token in (self._params.stop_token_ids or ()) and token not in self._eos:
                self.stop_reason = token
            self.finish(FINISH_NAMES[FinishReason(reason)])

    def finish(self, reason: str) -> None:
        """End the sequence and release the text that was held back."""
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.finish())
        for passage in self._passages.finish() if self._passages is not None else ():
            self._search(*passage)
        if self.finish_reason is None:
            if self._matcher is not None:
                self._texts.append(self._matcher.finish())
            self.finish_reason = reason

    def take(self) -> Delta:
        """Return what is new since the last call."""
        delta = Delta("".join(self._texts), self._tokens, self._logprobs)
        self._texts, self._tokens, self._logprobs = [], [], []
        return delta

    def _add_text(self, text: str) -> None:
        if self._matcher is None:
            self._texts.append(text)
        elif self._passages is None:
            self._search(text, is_call=False)
        else:
            for passage in self._passages.push(text):
                self._search(*passage)

    def _search(self, text: str, is_call: bool) -> None:
        """Add text, up to the end of a stop string where it is no call's."""
        matcher = self._matcher
        assert matcher is not None
        if self.finish_reason is not None:
            return
        # Text of the first min_tokens tokens is not searched for stop strings, as in vLLM.
        if is_call or self.num_tokens <= self._params.min_tokens:
            self._texts.append(matcher.finish() + text)
            return
        self._texts.append(matcher.push(text))
        if matcher.matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = matcher.matched
