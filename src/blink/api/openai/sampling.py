# SPDX-License-Identifier: Apache-2.0
"""From a request body to SamplingParams. As in vLLM, generation_config.json fills in what the client left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from blink.api.openai.structured import read_structured_outputs
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.sampling_ranges import SAMPLING_RANGES

_MAX_DIGITS = 10  # more than any token id has
_MAX_SHOWN = 40  # characters of a wrong one
_MAX_KEYS = 10  # wrong ones that are shown
# Fields that SamplingParams has too, where None and what is not given are its defaults.
_SAME = {
    "n", "min_tokens", "seed", "logprob_token_ids", "bad_words", "thinking_token_budget", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "priority",
    "tpot_target_ms", *SAMPLING_RANGES,
}  # fmt: skip
_OF_MODELS = {name for name in SAMPLING_RANGES if GenerationBody.model_fields[name].default is None}


def build_sampling_params(body: CompletionBody | ChatBody, defaults: Mapping[str, float | int]) -> SamplingParams:
    """Return the sampling parameters of a request; the planner checks them against the engine.

    Raises:
        BadRequestError: a value is out of range; `param` names it.
    """
    if body.token_limit == 0 and not body.echo:
        raise BadRequestError("max_tokens must be at least 1 without echo, got 0.", "max_tokens")
    _check_named_logprobs(body)
    limits = [limit for limit in (body.token_limit, defaults.get("max_tokens")) if limit is not None]
    given: dict[str, Any] = {
        name: value for name in body.model_fields_set & _SAME if (value := getattr(body, name)) is not None
    }
    if defaults:
        given = {name: value for name, value in defaults.items() if name in _OF_MODELS} | given
    return SamplingParams(
        max_tokens=int(min(limits)) if limits else None,
        logprobs=None if body.logprob_token_ids else body.top_logprobs_count,
        prompt_logprobs=body.prompt_logprobs_count,
        logit_bias=_by_token_id(body.logit_bias) if body.logit_bias else {},
        allowed_token_ids=body.allowed_token_ids or None,
        extra_args=body.vllm_xargs,
        best_effort=body.service_tier == "flex",
        structured_outputs=read_structured_outputs(body.response_format, body.structured_outputs),
        **given,
    )


def _check_named_logprobs(body: CompletionBody | ChatBody) -> None:
    name = "logprob_token_ids"
    if not body.logprob_token_ids:
        return
    if body.top_logprobs_count is None:
        raise BadRequestError(f"when using `{name}`, `logprobs` must be set.", name)
    if body.token_limit == 0:
        raise BadRequestError(f"{name} needs max_tokens of at least 1: no output tokens are generated.", name)
    if body.use_beam_search:
        raise BadRequestError(f"{name} is not supported with beam search.", name)


def _by_token_id(biases: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in biases if not (key.isascii() and key.isdigit()) or len(key) > _MAX_DIGITS]
    if not wrong:
        return {int(key): bias for key, bias in biases.items()}
    shown = ", ".join(repr(key[:_MAX_SHOWN]) for key in wrong[:_MAX_KEYS])
    more = f" and {len(wrong) - _MAX_KEYS} more" if len(wrong) > _MAX_KEYS else ""
    verb = "is not a token id" if len(wrong) == 1 else "are not token ids"
    raise BadRequestError(f"logit_bias: {shown}{more} {verb} of this model.", "logit_bias")
