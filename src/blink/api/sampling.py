# SPDX-License-Identifier: Apache-2.0
"""From a request body to SamplingParams. As in vLLM, generation_config.json fills in what the client left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blink.api.schema import ChatBody, CompletionBody
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams

_STANDARD = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_MAX_BIAS = 100.0


def build_sampling_params(
    body: CompletionBody | ChatBody,
    *,
    max_tokens: int,
    vocab_size: int,
    defaults: Mapping[str, float | int],
    allow_priority: bool,
) -> SamplingParams:
    """Return the checked sampling parameters of a request.

    Raises:
        BadRequestError: a value is out of range; `param` names it.
    """
    if body.priority and not allow_priority:
        raise BadRequestError('Got priority but the scheduling policy is not "priority".', "priority")
    chosen = {name: getattr(body, name) for name in _STANDARD}
    filled: dict[str, Any] = {
        name: defaults.get(name, _STANDARD[name]) if value is None else value for name, value in chosen.items()
    }
    return SamplingParams(
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        logprobs=body.top_logprobs_count,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop=body.stops,
        stop_token_ids=_stop_tokens(body.stop_token_ids or (), vocab_size),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        priority=body.priority,
        best_effort=body.service_tier == "flex",
        **filled,
    )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Return the biases by token id, clamped to [-100, 100] as vLLM does."""
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or int(key) >= vocab_size:
            raise BadRequestError(f"logit_bias: {key!r} is not a token id of this model.", "logit_bias")
        result[int(key)] = min(_MAX_BIAS, max(-_MAX_BIAS, bias))
    return result


def _stop_tokens(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequestError(f"stop_token_ids: {token} is not a token id of this model.", "stop_token_ids")
    return tuple(tokens)
