# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen: the names and defaults of vLLM's SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from numbers import Real
from operator import attrgetter
from typing import Any

from blink.errors import BadRequestError, wrong_value
from blink.region.layout import CONSTANTS, SAMPLING, ServiceClass
from blink.sampling_ranges import SAMPLING_RANGES
from blink.structural_tag import read_structural_tag
from blink.structured_outputs import StructuredOutputsParams

MAX_STOP_TOKENS = CONSTANTS["max_stop_tokens"]
MAX_LOGIT_BIASES = CONSTANTS["max_logit_biases"]
MAX_LOGPROBS = CONSTANTS["max_logprobs"]
MAX_ALLOWED_TOKENS = 1 << 20  # more than any vocabulary has
MAX_LOGIT_BIAS = CONSTANTS["max_logit_bias"]
MAX_TPOT_TARGET_MS = CONSTANTS["max_tpot_target_us"] / 1000
MAX_CHOICES = 128
MAX_STOPS = 128
MAX_STOP_CHARS = 16_384  # of all stop strings of a request together
_MAX_BUDGET = 1 << 30  # longer than any context
_INTEGERS = (
    "n", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority", "thinking_token_budget",
)  # fmt: skip
PLANNED_FIELDS = ("token_marks", "token_biases", "reasoning_limit", "reasoning_open", "reasoning_close")
_NUMBERS, _INTEGER_TYPES = {int, float}, {int, type(None)}  # nearly all are one of these, which is sooner seen
_integers_of, _ranged_of = attrgetter(*_INTEGERS), attrgetter(*SAMPLING_RANGES)  # all at once
_USUAL = tuple(allowed.default for allowed in SAMPLING_RANGES.values())
_SERVICE_CLASSES = (int(ServiceClass.LATENCY_SENSITIVE), int(ServiceClass.BEST_EFFORT))


GuidedDecodingParams = StructuredOutputsParams  # older vLLM's name


class RequestOutputKind(Enum):
    """What each output of a stream holds, by vLLM's names."""

    CUMULATIVE = 0  # all since the beginning
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


@dataclass(slots=True)
class SamplingParams:
    """Describe how to sample one request. Fields, their order and their defaults are vLLM's, Blink's own come last.

    Args:
        n: sequences to generate from the prompt; sequence i uses seed + i.
        temperature: 0 is greedy.
        top_k: 0 or -1 considers all tokens.
        seed: None or -1 draws one.
        stop: a string, or several, that end the text; cut from it unless include_stop_str_in_output.
        max_tokens: None fills the context; 0 generates nothing, for prompts whose logprobs are wanted.
        logprobs: None for none, else how many top tokens to report beside the sampled one (0 to 20).
        prompt_logprobs: the same for each token of the prompt but the first; its prefix is not taken from the cache.
        logprob_token_ids: tokens whose logprobs are reported beside the sampled one's, instead of the top ones' (20 at
            most).
        flat_logprobs: taken; logprobs have one form.
        detokenize: False leaves the text empty, and forbids `stop`.
        output_kind: what each output of AsyncLLM's streams holds.
        structured_outputs: what form the text has; None: any.
        allowed_token_ids: no other tokens are generated.
        extra_args: for plug-ins, of which there are none: carried and not read.
        bad_words: texts that are not generated, neither at the beginning of a word nor behind a space.
        skip_reading_prefix_cache: compute all of the prompt.
        thinking_token_budget: tokens of the first reasoning, behind which it is closed; None or -1: any.
        stream_interval: tokens between two outputs of AsyncLLM's streams.
        truncate_prompt_tokens: how many of the prompt's last tokens are kept; -1: as many as fit.
        guided_decoding: older vLLM's name of structured_outputs.
        best_effort: run in the class that latency-sensitive requests may preempt.
        tpot_target_ms: time per output token that is soon enough; 0: none is; None: the engine's.
        priority: lower runs earlier; only with the scheduling policy "priority".
        token_marks: tokens that the text shows otherwise than by their names, for what reads its structure.
        token_biases: what allowed_token_ids and bad_words come to, beside logit_bias; the planner's.
        reasoning_limit: what thinking_token_budget comes to: 1 + the tokens behind which reasoning is closed; 0: any;
            the planner's.
        reasoning_open: the token that begins reasoning; -1: the prompt has begun it; the planner's.
        reasoning_close: the token that ends it; the planner's.
    Raises:
        BadRequestError: a value is out of range, or asks for what is not done here; `param` names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = field(default_factory=dict[int, float])
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    bad_words: Sequence[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object = None
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: StructuredOutputsParams | None = None
    _: KW_ONLY
    priority: int = 0
    best_effort: bool = False
    tpot_target_ms: float | None = None
    token_marks: Mapping[str, str] | None = None
    token_biases: Sequence[tuple[int, float]] = ()
    reasoning_limit: int = 0
    reasoning_open: int = -1
    reasoning_close: int = -1

    def __post_init__(self) -> None:
        self._fill_in()
        if not 1 <= self.n <= MAX_CHOICES:
            raise wrong_value("n", f"between 1 and {MAX_CHOICES}", self.n)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise wrong_value("max_tokens", "at least 0", self.max_tokens)
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise wrong_value("min_tokens", "between 0 and max_tokens", self.min_tokens)
        if (values := _ranged_of(self)) != _USUAL:
            for (name, allowed), value in zip(SAMPLING_RANGES.items(), values, strict=True):
                if value != allowed.default and not allowed.holds(value):
                    raise BadRequestError(f"{name} must be in {allowed}, got {value}.", name)
        self._check_integer("top_k")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise wrong_value("seed", "a 64-bit integer", self.seed)
        if self.logprobs is not None or self.prompt_logprobs is not None:
            for name in ("logprobs", "prompt_logprobs"):
                self._check_logprobs(name)
        self._check_tokens()
        if stops := self.stops:
            self._check_stops(stops)
        if not -(2**31) <= self.priority < 2**31:
            raise wrong_value("priority", "a 32-bit integer", self.priority)
        if self.tpot_target_ms is not None:
            self._check_tpot_target(self.tpot_target_ms)
        if self.repetition_detection:
            raise BadRequestError("repetition_detection is not supported by this server.", "repetition_detection")
        budget = self.thinking_token_budget
        if budget is not None and not -1 <= budget <= _MAX_BUDGET:
            raise wrong_value("thinking_token_budget", f"between 0 and {_MAX_BUDGET}, or -1 for any", budget)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return deepcopy(self)

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """Return parameters of values of which None is the default.

        Raises:
            BadRequestError: a value is out of range.
        """
        given = {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
        return cls(**dict[str, Any](given))

    def _fill_in(self) -> None:
        """Put in what values that mean the default stand for, and refuse those of another type."""
        if not _INTEGER_TYPES.issuperset(map(type, _integers_of(self))):
            for name in _INTEGERS:
                self._check_integer(name)
        if not _NUMBERS.issuperset(map(type, _ranged_of(self))):
            for name in SAMPLING_RANGES:
                _check_number(name, getattr(self, name))
        self.stop = () if self.stop is None else self.stop
        self.stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        self.seed = None if self.seed == -1 else self.seed
        if self.logprob_token_ids is not None:
            self._read_named_logprobs(self.logprob_token_ids)
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                raise BadRequestError("Set either structured_outputs or guided_decoding.", "guided_decoding")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        form = self.structured_outputs
        if form is not None and isinstance(form.structural_tag, str):
            found = read_structural_tag(form.structural_tag)
            self.structured_outputs = replace(found, disable_any_whitespace=form.disable_any_whitespace)

    def _check_integer(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise BadRequestError(f"{name} must be an integer, got {value!r}.", name)

    def _check_logprobs(self, name: str) -> None:
        count = getattr(self, name)
        if count is None or 0 <= count <= MAX_LOGPROBS:
            return
        if count == -1:
            raise BadRequestError(
                f"{name} of -1 asks for the whole vocabulary: this server reports at most {MAX_LOGPROBS}.", name
            )
        raise wrong_value(name, f"between 0 and {MAX_LOGPROBS}", count)

    def _read_named_logprobs(self, token_ids: Sequence[int]) -> None:
        """Ask for one logprob for each token that is named."""
        named, name = list(dict.fromkeys(token_ids)), "logprob_token_ids"
        if not named:
            self.logprob_token_ids = None
            return
        if len(named) > MAX_LOGPROBS:
            raise wrong_value(name, f"at most {MAX_LOGPROBS} ids", len(named))
        if self.logprobs not in (None, len(named)):
            raise wrong_value("logprobs", f"the number of {name}, or none", self.logprobs)
        self.logprob_token_ids, self.logprobs = named, len(named)

    def _check_tpot_target(self, target: float) -> None:
        _check_number("tpot_target_ms", target)
        if target != 0 and not 0.001 <= target <= MAX_TPOT_TARGET_MS:
            raise wrong_value("tpot_target_ms", f"0, or between 0.001 and {MAX_TPOT_TARGET_MS:g}", target)

    def _check_tokens(self) -> None:
        if self.logit_bias:
            _check_biases(self.logit_bias, len(self.logprob_token_ids or ()))
        stops, allowed, most = self.stop_token_ids or (), self.allowed_token_ids, MAX_STOP_TOKENS // 2
        if len(stops) > most:
            raise wrong_value("stop_token_ids", f"at most {most} ids", len(stops))
        if allowed is not None and not len(allowed):
            raise wrong_value("allowed_token_ids", "one id or more", "none")
        words = self.bad_words
        if words is not None and (isinstance(words, str) or not all(isinstance(word, str) and word for word in words)):
            raise BadRequestError("bad_words must be a list of non-empty strings.", "bad_words")
        keep, interval = self.truncate_prompt_tokens, self.stream_interval
        if keep is not None and keep != -1 and keep < 1:
            raise wrong_value("truncate_prompt_tokens", "at least 1, or -1", keep)
        if interval is not None and interval < 1:
            raise wrong_value("stream_interval", "at least 1", interval)

    def _check_stops(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise wrong_value("stop", "non-empty strings", "")
        if len(stops) > MAX_STOPS:
            raise wrong_value("stop", f"at most {MAX_STOPS} strings", len(stops))
        stop_chars = sum(map(len, stops))
        if stop_chars > MAX_STOP_CHARS:
            raise wrong_value("stop", f"at most {MAX_STOP_CHARS} characters in sum", stop_chars)
        if not self.detokenize:
            raise BadRequestError("stop needs detokenize=True: stop strings are found in the text.", "stop")

    def derive(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values, which are not checked: the caller knows that they are in range."""
        made = object.__new__(type(self))
        for name, value in zip(_NAMES, _values_of(self), strict=True):
            setattr(made, name, value)
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def biases(self) -> Sequence[tuple[int, float]]:
        """Return all that is added to logits: nothing to those of logprob_token_ids, which come first.

        A token may stand there more than once.
        """
        if not (self.logit_bias or self.token_biases or self.logprob_token_ids):
            return ()
        named = [(token, 0.0) for token in self.logprob_token_ids or ()]
        return [*named, *(self.logit_bias or {}).items(), *self.token_biases]

    @property
    def _tpot_target_us(self) -> int:
        if self.tpot_target_ms is None:
            return 0
        return round(self.tpot_target_ms * 1000) or CONSTANTS["no_tpot_target"]

    def native_values(self, seed: int) -> dict[str, float]:
        """Return what travels in an SQE by the names of csrc's fields; a field that is named as here needs no line."""
        assert self.max_tokens is not None  # the planner has filled it in
        values: dict[str, float] = {
            "num_logprobs": -1 if self.logprobs is None else self.logprobs,
            "named_logprobs": len(self.logprob_token_ids or ()),
            "num_prompt_logprobs": 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs,
            "seed_low": seed & 0xFFFFFFFF,
            "seed_high": seed >> 32 & 0xFFFFFFFF,
            "service_class": _SERVICE_CLASSES[self.best_effort],
            "max_tokens": max(self.max_tokens, 1),  # a prompt's last step has a token, which nobody sees with 0
            "priority": self.priority,
            "tpot_target_us": self._tpot_target_us,
        }
        values.update(zip(_SAME_NAMES, _same_of(self), strict=True))
        return values


_NAMES = tuple(SamplingParams.__dataclass_fields__)
_SAME_NAMES = tuple(name for name in SAMPLING.names or () if name in _NAMES)
_values_of, _same_of = attrgetter(*_NAMES), attrgetter(*_SAME_NAMES)


def _check_biases(biases: Mapping[int, float], num_named: int) -> None:
    most = MAX_LOGIT_BIASES - num_named
    if len(biases) > most:
        raise wrong_value("logit_bias", f"at most {most} entries", len(biases))
    for bias in biases.values():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise wrong_value("logit_bias", f"in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]", bias)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadRequestError(f"{name} must be a number, got {value!r}.", name)
