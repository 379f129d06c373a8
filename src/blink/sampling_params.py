# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen: the names and defaults of vLLM's SamplingParams."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blink.errors import BadRequestError
from blink.region.layout import CONSTANTS, SAMPLING, TABLE, ServiceClass
from blink.structured_outputs import StructuredOutputsParams

MAX_STOP_TOKENS = CONSTANTS["max_stop_tokens"]
MAX_LOGIT_BIASES = CONSTANTS["max_logit_biases"]
MAX_LOGPROBS = CONSTANTS["max_logprobs"]
MAX_LOGIT_BIAS = CONSTANTS["max_logit_bias"]
MAX_STOPS = 128
MAX_STOP_CHARS = 16_384  # of all stop strings of a request together
_SAMPLING_FIELDS = SAMPLING.names or ()
_SERVICE_CLASSES = (int(ServiceClass.LATENCY_SENSITIVE), int(ServiceClass.BEST_EFFORT))


class Range(NamedTuple):
    """What a sampling parameter is unless told, and what it may be."""

    default: float
    low: float
    high: float
    holds_low: bool

    def __str__(self) -> str:
        return f"{'[' if self.holds_low else '('}{self.low:.15g}, {self.high:.15g}]"

    def holds(self, value: float) -> bool:
        """Tell whether a value is within the range, and stays there in the engine's float32; no NaN is."""
        return self.low <= value <= self.high and (self.holds_low or _as_native(value) > self.low)


def _read_range(name: str, default: float, low: float, high: float, holds_low: bool) -> Range:
    kind = float if SAMPLING[name].kind == "f" else int
    return Range(kind(default), kind(low), kind(high), holds_low)


# The parameters that csrc/sampler/params.h lists, in its order.
SAMPLING_RANGES: Mapping[str, Range] = {name: _read_range(name, *values) for name, values in TABLE["sampling"].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Describe how to sample one request.

    Args:
        n: sequences to generate from the prompt; sequence i uses seed + i.
        temperature: 0 is greedy.
        top_k: 0 or -1 considers all tokens.
        logprobs: None for none, else how many top tokens to report beside the sampled one (0 to 20).
        prompt_logprobs: the same for each token of the prompt but the first; its prefix is not taken from the cache.
        max_tokens: None fills the context; 0 generates nothing, for prompts whose logprobs are wanted.
        stop: a string, or several, that end the text; cut from it unless include_stop_str_in_output.
        best_effort: run in the class that latency-sensitive requests may preempt.
        priority: lower runs earlier; only with the scheduling policy "priority".
        structured_outputs: what form the text has; None: any.
        token_marks: tokens that the text shows otherwise than by their names, for what reads its structure.
    Raises:
        BadRequestError: a value is out of range; `param` names it.
    """

    n: int = 1
    max_tokens: int | None = 16
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
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int = 0
    best_effort: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    token_marks: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.n <= 128, "n", "between 1 and 128", self.n)
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        _require(
            self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "min_tokens",
            "between 0 and max_tokens",
            self.min_tokens,
        )
        for name, allowed in SAMPLING_RANGES.items():
            value = getattr(self, name)
            _require(allowed.holds(value), name, f"in {allowed}", value)
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}", count)
        _check_biases(self.logit_bias)
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS // 2,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKENS // 2} ids",
            len(self.stop_token_ids),
        )
        self._check_stops()
        _require(-(2**31) <= self.priority < 2**31, "priority", "a 32-bit integer", self.priority)

    def _check_stops(self) -> None:
        _require(all(self.stops), "stop", "non-empty strings", "")
        _require(len(self.stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings", len(self.stops))
        stop_chars = sum(map(len, self.stops))
        _require(stop_chars <= MAX_STOP_CHARS, "stop", f"at most {MAX_STOP_CHARS} characters in sum", stop_chars)

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def native_values(self, seed: int) -> dict[str, float]:
        """Return what travels in an SQE by the names of csrc's fields; a field that is named as here needs no line."""
        assert self.max_tokens is not None  # the planner has filled it in
        values: dict[str, float] = {
            "num_logprobs": -1 if self.logprobs is None else self.logprobs,
            "num_prompt_logprobs": 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs,
            "seed_low": seed & 0xFFFFFFFF,
            "seed_high": seed >> 32 & 0xFFFFFFFF,
            "service_class": _SERVICE_CLASSES[self.best_effort],
            "max_tokens": max(self.max_tokens, 1),  # a prompt's last step has a token, which nobody sees with 0
            "priority": self.priority,
        }
        return {name: getattr(self, name) for name in _SAMPLING_FIELDS if name not in values} | values


def _check_biases(biases: Mapping[int, float]) -> None:
    _require(len(biases) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} entries", len(biases))
    for bias in biases.values():
        rule = f"in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]"
        _require(-MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS, "logit_bias", rule, bias)


def _as_native(value: float) -> float:
    """Return the value as the engine gets it: tiny ones become 0 in float32."""
    return ctypes.c_float(value).value


def _require(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise BadRequestError(f"{param} must be {rule}, got {value}.", param)
