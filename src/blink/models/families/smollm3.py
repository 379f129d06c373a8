# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: layers without a rotary embedding among those with one."""

from __future__ import annotations

from dataclasses import replace

from blink.errors import ConfigError
from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.layers import change_some, remove_rope
from blink.models.spec import ModelSpec

_INTERVAL = 4


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    interval = config.integer("no_rope_layer_interval", _INTERVAL)
    usual = [int(_has_rope(layer, interval)) for layer in range(spec.num_layers)]
    has_rope = config.integers("no_rope_layers", usual)  # 1: the layer has one, whatever the name says
    if len(has_rope) < spec.num_layers:
        raise ConfigError(f"{config.place}: 'no_rope_layers' must say of each layer whether it rotates.")
    chosen = {layer for layer in range(spec.num_layers) if not has_rope[layer]}
    return replace(spec, layers=change_some(spec.layers, chosen, remove_rope))


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:  # noqa: ARG001 - files do not say it
    chosen = {layer for layer in range(spec.num_layers) if not _has_rope(layer, _INTERVAL)}
    return replace(spec, layers=change_some(spec.layers, chosen, remove_rope))


def _has_rope(layer: int, interval: int) -> bool:
    return (layer + 1) % interval > 0


FAMILIES = {
    "smollm3": Family(
        title="SmolLM3",
        defaults={"rope_theta": 2e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        adapt_config=_adapt_config,
        gguf="smollm3",
        is_interleaved=True,
        adapt_gguf=_adapt_gguf,
    ),
}
