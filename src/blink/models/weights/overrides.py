# SPDX-License-Identifier: Apache-2.0
"""--hf-overrides: what replaces parts of a model's config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_ROPE_NAMES: Final = ("rope_scaling", "rope_parameters")  # before transformers 5, and since
# Kinds of scaling by whose factor a model's context grows.
_STRETCHING: Final = ("yarn", "linear", "dynamic")


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with changes, objects inside of it changed key by key.

    New rotary options take the place of the old ones, but for the base; scaling lengthens the context, as in vLLM.
    """
    result = {**values}
    for key, change in changes.items():
        if key not in _ROPE_NAMES:
            old = result.get(key)
            result[key] = override(old, change) if isinstance(old, Mapping) and isinstance(change, Mapping) else change
    rope = next((changes[name] for name in _ROPE_NAMES if name in changes), None)
    if isinstance(rope, Mapping):
        _replace_rope(result, rope, keeps_length="max_position_embeddings" in changes)
    elif any(name in changes for name in _ROPE_NAMES):
        result |= {name: changes[name] for name in _ROPE_NAMES if name in changes}
    if "rope_theta" in changes and isinstance(result.get("rope_parameters"), Mapping):
        result["rope_parameters"] = {**result["rope_parameters"], "rope_theta": changes["rope_theta"]}
    return result


def _replace_rope(result: dict[str, Any], rope: Mapping[str, Any], *, keeps_length: bool) -> None:
    old = result.get("rope_parameters")
    base = {"rope_theta": old["rope_theta"]} if isinstance(old, Mapping) and "rope_theta" in old else {}
    result.pop("rope_scaling", None)
    result["rope_parameters"] = {**base, **rope}
    factor, kind = rope.get("factor"), rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings", result.get("max_position_embeddings"))
    if kind in _STRETCHING and not keeps_length and isinstance(factor, int | float) and isinstance(original, int):
        result["max_position_embeddings"] = int(original * factor)
