# SPDX-License-Identifier: Apache-2.0
"""The sampling options of llama.cpp, which Ollama has too, as fields of a chat or a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.errors import BadRequestError

# Option -> the field that it is here.
_FIELDS = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
FIELD_ORIGINS = {field: option for option, field in _FIELDS.items()}
# Option -> the values that ask for what is done here anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "n_cmpl": (1,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
# Options of how a process runs a model, and those that only matter together with one that is refused.
_QUIET = {
    "adaptive_decay", "adaptive_target", "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "embedding_only", "f16_kv", "id_slot", "logits_all", "low_vram",
    "main_gpu", "min_keep", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard", "n_indent", "n_keep",
    "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "penalize_nl",
    "repeat_last_n", "samplers", "t_max_predict_ms", "t_max_prompt_ms", "use_mlock", "use_mmap", "vocab_only",
    "xtc_threshold",
}  # fmt: skip
_PENALTIES = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_WHOLE_TEXT, _SWITCHED_OFF = -1, 0


def is_known(option: str) -> bool:
    """Say whether an option is one of llama.cpp's."""
    return option in _FIELDS or option in _NEUTRAL or option in _QUIET


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that options mean; null is an option that is not there.

    Raises:
        BadRequestError: an option changes the text in a way that is not done here; `param` names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, allowed in _NEUTRAL.items():
        if name in given and given[name] not in allowed:
            raise BadRequestError(f"{name} is not supported by this server.", name)
    fields = {_FIELDS[name]: value for name, value in given.items() if name in _FIELDS}
    if isinstance(limit := fields.get("max_tokens"), int) and limit < 0:
        del fields["max_tokens"]  # as many as fit
    return fields | _penalties_of(given)


def _penalties_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the number of tokens that penalties look at comes to: none, or the whole text."""
    window = given.get("repeat_last_n", _WHOLE_TEXT)
    active = {name: neutral for name, neutral in _PENALTIES.items() if given.get(name, neutral) != neutral}
    if not active or window == _WHOLE_TEXT:
        return {}
    if window == _SWITCHED_OFF:
        return {_FIELDS[name]: neutral for name, neutral in active.items()}
    raise BadRequestError("repeat_last_n must be -1 or 0: penalties look at the whole text.", "repeat_last_n")
