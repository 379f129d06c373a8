# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as `--speculative-config` describes it: vLLM's JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blink.bits import power_of_two
from blink.errors import ConfigError

_FLAG = "--speculative-config"
_NGRAM = ("ngram", "ngram_gpu")  # Blink has one: the scheduler looks n-grams up where it runs
_NOT_YET = ("suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark")
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "rejection_sample_method")
_USUAL_TOKENS, _USUAL_MIN, _USUAL_MAX = 5, 2, 5
_MOST_NGRAM = 16
_DRAFT_ROWS = 128  # of a step that verifies drafts, where fewer sequences run
_MOST_NGRAMS = 1 << 14  # entries of a slot's table, 4 bytes each
MAX_DRAFTS = 15  # as csrc/region/layout.h has it


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts the scheduler makes."""

    num_tokens: int = 0  # the most of a sequence in one step; 0: none
    ngram_min: int = 0  # tokens in common with the text's end
    ngram_max: int = 0

    def count_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return the most rows of a step: one for each sequence, and more for the drafts of each."""
        drafts = min(max_num_seqs * (1 + self.num_tokens), _DRAFT_ROWS)
        return max(max_num_seqs, min(drafts, max_num_batched_tokens))

    def sizes(self, max_model_len: int, vocab_size: int, *, knows_bytes: bool) -> dict[str, int]:
        """Return the fields of a geometry; knows_bytes: whether the engine has the bytes of its tokens."""
        return {
            "spec_tokens": self.num_tokens,
            "ngram_min": self.ngram_min,
            "ngram_max": self.ngram_max,
            "ngram_entries": min(power_of_two(4 * max_model_len), _MOST_NGRAMS),
            "token_entries": power_of_two(4 * vocab_size) if self.num_tokens and knows_bytes else 0,
        }


def read_speculation(values: Mapping[str, Any]) -> Speculation:
    """Return what the object of --speculative-config asks for; an empty one is none.

    Raises:
        ConfigError: it names what Blink does not do, or values out of range.
    """
    if not values:
        return Speculation()
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    if method not in _NGRAM:
        state = "not yet" if method in _NOT_YET else "unknown"
        raise ConfigError(f"{_FLAG}: method {method!r} is {state}: Blink drafts by ngram")
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{_FLAG} has no {unknown[0]!r} with ngram: it takes {', '.join(_KEYS)}")
    if values.get("rejection_sample_method", "standard") != "standard":
        raise ConfigError(f"{_FLAG}: rejection_sample_method may only be standard: others change what is sampled")
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


def check_on_gpu(speculation: Speculation, *, is_latent: bool, has_windows: bool) -> None:
    """Refuse speculation, with a `ConfigError`, for the attention of which no test on a GPU has verified drafts."""
    reason = "latent attention" if is_latent else "a sliding window" if has_windows else ""
    if speculation.num_tokens and reason:
        raise ConfigError(f"{_FLAG}: models with {reason} do not verify drafts on GPUs yet: add --device cpu")


def _take(values: Mapping[str, Any], key: str, usual: int, most: int) -> int:
    value = values.get(key)
    value = usual if value is None else value
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{_FLAG}: {key} must be a whole number between 1 and {most}, got {value!r}")
    return value
