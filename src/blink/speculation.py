# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as `--speculative-config` describes it: vLLM's JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blink.errors import ConfigError

_FLAG = "--speculative-config"
_NGRAM = ("ngram", "ngram_gpu")  # Blink has one: the scheduler looks n-grams up where it runs
_EAGLE = "eagle3"
_NOT_YET = ("suffix", "draft_model", "eagle", "mtp", "medusa", "mlp_speculator", "dflash", "dspark")
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "rejection_sample_method")
_EAGLE_KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method")
_USUAL_HEAD_TOKENS = 3
_USUAL_TOKENS, _USUAL_MIN, _USUAL_MAX = 5, 2, 5
_MOST_NGRAM = 16
MAX_DRAFTS = 15  # as csrc/region/layout.h has it


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts are made."""

    num_tokens: int = 0  # the most of a sequence in one step; 0: none
    ngram_min: int = 0  # tokens in common with the text's end
    ngram_max: int = 0  # less than ngram_min: no n-gram is looked up
    head: str = ""  # the folder of the model's draft head; empty: it has none


def read_speculation(values: Mapping[str, Any]) -> Speculation:
    """Return what the object of --speculative-config asks for; an empty one is none.

    Raises:
        ConfigError: it names what Blink does not do, or values out of range.
    """
    if not values:
        return Speculation()
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    if method != _EAGLE and method not in _NGRAM:
        state = "not yet" if method in _NOT_YET else "unknown"
        raise ConfigError(f"{_FLAG}: method {method!r} is {state}: Blink drafts by ngram and eagle3")
    keys = _EAGLE_KEYS if method == _EAGLE else _KEYS
    unknown = [key for key in values if key not in keys]
    if unknown:
        raise ConfigError(f"{_FLAG} has no {unknown[0]!r} with {method}: it takes {', '.join(keys)}")
    if values.get("rejection_sample_method", "standard") != "standard":
        raise ConfigError(f"{_FLAG}: rejection_sample_method may only be standard: others change what is sampled")
    return _read_head(values) if method == _EAGLE else _read_ngrams(values)


def _read_head(values: Mapping[str, Any]) -> Speculation:
    folder = values.get("model")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{_FLAG}: eagle3 needs a model: the folder of the draft head")
    num_tokens = _take(values, "num_speculative_tokens", _USUAL_HEAD_TOKENS, MAX_DRAFTS)
    return Speculation(num_tokens=num_tokens, ngram_min=1, ngram_max=0, head=folder)


def _read_ngrams(values: Mapping[str, Any]) -> Speculation:
    shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    return Speculation(
        num_tokens=_take(values, "num_speculative_tokens", _USUAL_TOKENS, MAX_DRAFTS),
        ngram_min=_take(values, "prompt_lookup_min", min(_USUAL_MIN, longest or _USUAL_MIN), longest or _MOST_NGRAM),
        ngram_max=_take(values, "prompt_lookup_max", max(_USUAL_MAX, shortest or _USUAL_MAX), _MOST_NGRAM),
    )


def check_recurrent(speculation: Speculation, is_recurrent: bool) -> None:
    """Refuse speculation, with a `ConfigError`, for a model whose layers keep a state: no token is taken back of it."""
    if speculation.num_tokens and is_recurrent:
        raise ConfigError(f"{_FLAG}: models with recurrent layers do not verify drafts yet")


def check_ranks(speculation: Speculation, num_ranks: int) -> None:
    """Refuse a draft head, with a `ConfigError`, for a model that is parted among ranks."""
    if speculation.head and num_ranks > 1:
        raise ConfigError(f"{_FLAG}: draft heads run on one rank: leave out --tensor-parallel-size {num_ranks}")


def check_on_gpu(speculation: Speculation, *, is_latent: bool, has_windows: bool) -> None:
    """Refuse speculation, with a `ConfigError`, where no test on a GPU has verified its drafts."""
    reason = "latent attention" if is_latent else "a sliding window" if has_windows else ""
    if speculation.head:
        raise ConfigError(f"{_FLAG}: eagle3 runs on the CPU engine today: add --device cpu")
    if speculation.num_tokens and reason:
        raise ConfigError(f"{_FLAG}: models with {reason} do not verify drafts on GPUs yet: add --device cpu")


def _take(values: Mapping[str, Any], key: str, usual: int, most: int) -> int:
    value = values.get(key)
    value = usual if value is None else value
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{_FLAG}: {key} must be a whole number between 1 and {most}, got {value!r}")
    return value
