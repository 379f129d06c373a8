# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as `--speculative-config` describes it: vLLM's JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from blink.bits import power_of_two
from blink.errors import ConfigError

_FLAG = "--speculative-config"
_NGRAM = ("ngram", "ngram_gpu")  # Blink has one: the scheduler looks n-grams up where it runs
_SUFFIX, _EAGLE = "suffix", "eagle3"
_MTP = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp")  # the model says which it is
_NOT_YET = ("draft_model", "eagle", "medusa", "mlp_speculator", "dflash", "dspark")  # and the mtp of other models
_KEYS = ("method", "num_speculative_tokens", "rejection_sample_method")
_NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_DEPTH, _REQUESTS, _FACTOR, _CHANCE = _SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_METHODS = {  # and their own fields
    **dict.fromkeys(_NGRAM, _NGRAM_KEYS),
    _SUFFIX: _SUFFIX_KEYS,
    _EAGLE: ("model",),
    **dict.fromkeys(_MTP, ()),
}
_USUAL_HEAD_TOKENS, _USUAL_MTP_TOKENS = 3, 1
_USUAL_TOKENS, _USUAL_MIN, _USUAL_MAX = 5, 2, 5
_USUAL_DEPTH, _USUAL_REQUESTS, _USUAL_FACTOR, _USUAL_CHANCE = 24, 10_000, 1.0, 0.1
_MOST_DEPTH, _MOST_REQUESTS, _MOST_FACTOR = 64, 1_000_000, 64
_MOST_NGRAM = 16  # these two as csrc/region/layout.h has them
MAX_DRAFTS = 15
_ONE = 256  # what the scheduler takes 1 as, of factors and chances
_DRAFT_ROWS = 128  # of a step that verifies drafts, where fewer sequences run
_MOST_NGRAMS = 1 << 14  # entries of a slot's table, 4 bytes each
_MOST_ANSWER_TOKENS = 1 << 18  # of recent answers, 16 bytes each

# vLLM's metrics: statistics of the scheduler and what each counts.
COUNTERS = {
    "spec_decode_num_drafts": ("num_drafts", "Drafts of speculative decoding."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
}
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
ACCEPTED_TEXT = "Draft tokens that were accepted, by their place in the draft."
ACCEPTED_STATS = {str(place): f"accepted_at_{place}" for place in range(MAX_DRAFTS)}


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts are made."""

    num_tokens: int = 0  # the most of a sequence in one step; 0: none
    ngram_min: int = 0  # tokens in common with the text's end
    ngram_max: int = 0  # less than ngram_min: no n-gram is looked up
    suffix_depth: int = 0  # tokens of a match that make a draft longer; 0: drafts do not depend on it
    suffix_factor: int = 0  # tokens of a draft for each of its match, times 256
    suffix_chance: int = 0  # the least chance that a draft's tokens are accepted, times 256
    num_answers: int = 0  # recent ones of other requests that drafts are copied from
    head: str = ""  # the folder of the model's draft head; empty: it has none of its own
    mtp: bool = False  # whether the layer of the model's files that predicts one token further drafts

    @property
    def has_head(self) -> bool:
        """Whether a draft head reads the model's steps."""
        return self.mtp or bool(self.head)

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
            "ngram_entries": min(power_of_two(4 * max_model_len), _MOST_NGRAMS) if self.ngram_max else 0,
            "has_draft_head": self.has_head,
            "token_entries": power_of_two(4 * vocab_size) if self.num_tokens and knows_bytes else 0,
            "suffix_depth": self.suffix_depth,
            "suffix_factor": self.suffix_factor,
            "suffix_chance": self.suffix_chance,
            **self._answer_sizes(max_model_len),
        }

    def _answer_sizes(self, max_model_len: int) -> dict[str, int]:
        """Return the fields of recent answers."""
        if self.num_answers == 0:
            return {}
        tokens = min(power_of_two(self.num_answers * max_model_len), _MOST_ANSWER_TOKENS)
        return {"num_answers": self.num_answers, "answer_tokens": tokens, "answer_entries": 4 * tokens}


def is_speculating(geometry: Any) -> bool:
    """Tell whether an engine makes drafts; geometry: a record of csrc's Geometry."""
    return bool(geometry["spec_tokens"])


def read_speculation(values: Mapping[str, Any]) -> Speculation:
    """Return what the object of --speculative-config asks for; an empty one is none.

    Raises:
        ConfigError: it names what Blink does not do, or values out of range.
    """
    if not values:
        return Speculation()
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    if method not in _METHODS:
        state = "not yet" if method in _NOT_YET or str(method).endswith("_mtp") else "unknown"
        raise ConfigError(f"{_FLAG}: method {method!r} is {state}: Blink drafts by ngram, suffix, eagle3 or mtp")
    keys = (*_KEYS, *_METHODS[method])
    unknown = [key for key in values if key not in keys]
    if unknown:
        raise ConfigError(f"{_FLAG} has no {unknown[0]!r} with {method}: it takes {', '.join(keys)}")
    if values.get("rejection_sample_method", "standard") != "standard":
        raise ConfigError(f"{_FLAG}: rejection_sample_method may only be standard: others change what is sampled")
    read = {_SUFFIX: _read_suffix, _EAGLE: _read_head, **dict.fromkeys(_MTP, _read_mtp)}.get(method, _read_ngrams)
    return read(values)


def _read_head(values: Mapping[str, Any]) -> Speculation:
    folder = values.get("model")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{_FLAG}: eagle3 needs a model: the folder of the draft head")
    num_tokens = _take(values, "num_speculative_tokens", _USUAL_HEAD_TOKENS, 1, MAX_DRAFTS)
    return Speculation(num_tokens=num_tokens, ngram_min=1, ngram_max=0, head=folder)


def _read_mtp(values: Mapping[str, Any]) -> Speculation:
    num_tokens = _take(values, "num_speculative_tokens", _USUAL_MTP_TOKENS, 1, MAX_DRAFTS)
    return Speculation(num_tokens=num_tokens, ngram_min=1, ngram_max=0, mtp=True)


def _read_ngrams(values: Mapping[str, Any]) -> Speculation:
    shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    return Speculation(
        num_tokens=_take(values, "num_speculative_tokens", _USUAL_TOKENS, 1, MAX_DRAFTS),
        ngram_min=_take(values, "prompt_lookup_min", min(_USUAL_MIN, longest or _USUAL_MIN), 1, longest or _MOST_NGRAM),
        ngram_max=_take(values, "prompt_lookup_max", max(_USUAL_MAX, shortest or _USUAL_MAX), 1, _MOST_NGRAM),
    )


def _read_suffix(values: Mapping[str, Any]) -> Speculation:
    return Speculation(
        num_tokens=_take(values, "num_speculative_tokens", MAX_DRAFTS, 1, MAX_DRAFTS),
        ngram_min=_USUAL_MIN,
        ngram_max=_USUAL_MAX,
        suffix_depth=_take(values, _DEPTH, _USUAL_DEPTH, _USUAL_MIN, _MOST_DEPTH),
        suffix_factor=round(_take_real(values, _FACTOR, _USUAL_FACTOR, _MOST_FACTOR) * _ONE),
        suffix_chance=round(_take_real(values, _CHANCE, _USUAL_CHANCE, 1) * _ONE),
        num_answers=_take(values, _REQUESTS, _USUAL_REQUESTS, 0, _MOST_REQUESTS),
    )


class DescribedLayers(Protocol):
    """What a model's description says of its layers."""

    @property
    def has_latents(self) -> bool:
        """Whether one attends to latents."""
        ...

    @property
    def has_windows(self) -> bool:
        """Whether one attends to a window."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether one is recurrent."""
        ...


def check_on_gpu(speculation: Speculation, model: DescribedLayers, num_ranks: int) -> None:
    """Refuse speculation, with a `ConfigError`, for layers whose drafts no test on a GPU has verified."""
    found = {"latent attention": model.has_latents, "a sliding window": model.has_windows}
    found["recurrent layers on several GPUs"] = num_ranks > 1 and model.has_states
    reason = next((name for name, is_there in found.items() if is_there), "")
    if speculation.num_tokens and reason:
        raise ConfigError(f"{_FLAG}: models with {reason} do not verify drafts on GPUs yet: add --device cpu")


def _take(values: Mapping[str, Any], key: str, usual: int, least: int, most: int) -> int:
    value = values.get(key)
    value = usual if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{_FLAG}: {key} must be a whole number between {least} and {most}, got {value!r}")
    return value


def _take_real(values: Mapping[str, Any], key: str, usual: float, most: float) -> float:
    value = values.get(key)
    value = usual if value is None else value
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ConfigError(f"{_FLAG}: {key} must be a number between 0 and {most}, got {value!r}")
    return float(value)
