# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen: the names and defaults of vLLM's SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blink.errors import BadRequestError

MAX_STOP_TOKENS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 128
MAX_STOP_CHARS = 16_384  # of all stop strings of a request together


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Describe how to sample one request.

    Args:
        n: sequences to generate from the prompt; sequence i uses seed + i.
        temperature: 0 is greedy.
        top_k: 0 or -1 considers all tokens.
        logprobs: None for none, else how many top tokens to report beside the sampled one (0 to 20).
        stop: strings that end the text; cut from it unless include_stop_str_in_output.
        best_effort: run in the class that latency-sensitive requests may preempt.
        priority: lower runs earlier; only with the scheduling policy "priority".
    Raises:
        BadRequestError: a value is out of range; `param` names it.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int = 0
    best_effort: bool = False

    def __post_init__(self) -> None:
        _require(1 <= self.n <= 128, "n", "between 1 and 128", self.n)
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens", self.min_tokens)
        _require(_within(self.temperature, 0, 100), "temperature", "between 0 and 100", self.temperature)
        _require(_within(self.top_p, 0, 1) and self.top_p > 0, "top_p", "in (0, 1]", self.top_p)
        _require(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off), or at least 1", self.top_k)
        _require(_within(self.min_p, 0, 1), "min_p", "in [0, 1]", self.min_p)
        _require(_within(self.presence_penalty, -2, 2), "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _require(_within(self.frequency_penalty, -2, 2), "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _require(
            _within(self.repetition_penalty, 0, 1e6) and self.repetition_penalty > 0,
            "repetition_penalty",
            "greater than 0",
            self.repetition_penalty,
        )
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"between 0 and {MAX_LOGPROBS}",
            self.logprobs,
        )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIASES,
            "logit_bias",
            f"at most {MAX_LOGIT_BIASES} entries",
            len(self.logit_bias),
        )
        for bias in self.logit_bias.values():
            _require(_within(bias, -100, 100), "logit_bias", "in [-100, 100]", bias)
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS // 2,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKENS // 2} ids",
            len(self.stop_token_ids),
        )
        _require(all(self.stop), "stop", "non-empty strings", "")
        _require(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings", len(self.stop))
        stop_chars = sum(map(len, self.stop))
        _require(stop_chars <= MAX_STOP_CHARS, "stop", f"at most {MAX_STOP_CHARS} characters in sum", stop_chars)
        _require(-(2**31) <= self.priority < 2**31, "priority", "a 32-bit integer", self.priority)


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise BadRequestError(f"{param} must be {rule}, got {value}.", param)
