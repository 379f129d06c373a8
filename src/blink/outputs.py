# SPDX-License-Identifier: Apache-2.0
"""What `LLM` and `AsyncLLM` return, with the fields of vLLM's outputs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from blink.lora_request import LoRARequest
from blink.text.generation import TokenLogprob
from blink.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """How likely a token was; `rank` is None beyond the top tokens that were asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class PositionLogprobs(dict[int, Logprob]):
    """The tokens of one position by id: the one that is there first, then the likeliest ones.

    Its attributes are older names of Blink's; they go with the next version.
    """

    @property
    def token(self) -> int:
        """Return the token that is there."""
        _warn("token", "next(iter(...))")
        return next(iter(self))

    @property
    def logprob(self) -> float:
        """Return the logprob of the token that is there."""
        _warn("logprob", "the values' logprob")
        return next(iter(self.values())).logprob

    @property
    def top(self) -> list[tuple[int, float]]:
        """Return the likeliest tokens."""
        _warn("top", "the values' rank")
        ranked = sorted((entry.rank, token) for token, entry in self.items() if entry.rank is not None)
        return [(token, self[token].logprob) for _, token in ranked]


def _warn(name: str, instead: str) -> None:
    warnings.warn(
        f"{name} of a position's logprobs goes with the next version: it is a dict by token id, use {instead}.",
        DeprecationWarning,
        stacklevel=3,
    )


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Args:
        cumulative_logprob: the sum of its tokens' logprobs; None where none were asked for.
        logprobs: of each token, None where none were asked for.
        finish_reason: stop, length or abort; None while it grows.
        stop_reason: the stop string or token that ended it; None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Say whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The sequences of one prompt.

    Args:
        prompt: the text; None where token ids were given.
        prompt_logprobs: of each token of the prompt, None for the first; None where none were asked for.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        metrics, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: None always.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """What a prompt became."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return its dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ScoringOutput:
    """What a pair of texts became."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts, whose prompt is the model's template with both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search; its tokens and its text begin with the prompt."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The likeliest sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list[BeamSearchSequence])


def logprobs_of(tokenizer: Tokenizer, entry: TokenLogprob, *, is_ranked: bool = True) -> PositionLogprobs:
    """Return what a position's tokens are, by id; of tokens that a request names the ranks are not known."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)} if is_ranked else {}
    likely = {entry.token: entry.logprob, **dict(entry.top)}
    return PositionLogprobs(
        {token: Logprob(logprob, ranks.get(token), tokenizer.token_text(token)) for token, logprob in likely.items()}
    )
