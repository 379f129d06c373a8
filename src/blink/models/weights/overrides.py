# SPDX-License-Identifier: Apache-2.0
"""--hf-overrides: what replaces parts of a model's config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from blink.fields import Fields

_PLACE: Final = "--hf-overrides"
_ROPE_NAMES: Final = ("rope_scaling", "rope_parameters")  # before transformers 5, and since
# Kinds of scaling by whose factor a model's context grows.
_STRETCHING: Final = ("yarn", "linear", "dynamic")


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with changes, objects inside of it changed key by key.

    New rotary options take the place of the old ones, but for the base; scaling lengthens the context, as in vLLM.

    Raises:
        ConfigError: the rotary options are malformed.
    """
    result = _merge(values, {key: change for key, change in changes.items() if key not in _ROPE_NAMES})
    given = Fields(changes, _PLACE)
    for name in _ROPE_NAMES:
        if name in changes:
            old = Fields(result, "config.json")
            base = old.mapping("rope_parameters").get("rope_theta") if old.has("rope_parameters") else None
            rope = {**({} if base is None else {"rope_theta": base}), **given.mapping(name)}
            result = {key: value for key, value in result.items() if key not in _ROPE_NAMES}
            result |= {"rope_parameters": rope, **_stretch(result, rope, given)}
    if "rope_theta" in changes and Fields(result, "config.json").has("rope_parameters"):
        result["rope_parameters"] = {**result["rope_parameters"], "rope_theta": changes["rope_theta"]}
    return result


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = {**values}
    for key, change in changes.items():
        match (result.get(key), change):
            case (Mapping() as old, Mapping() as new):
                result[key] = _merge(old, new)
            case _:
                result[key] = change
    return result


def _stretch(values: Mapping[str, Any], options: Mapping[str, Any], given: Fields) -> dict[str, int]:
    """Return the longer context that scaling makes, unless a length is given too."""
    rope = Fields(options, _PLACE)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _STRETCHING or given.has("max_position_embeddings"):
        return {}
    length = Fields(values, "config.json").integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", length)
    return {"max_position_embeddings": int(original * rope.number("factor", 1.0))}
