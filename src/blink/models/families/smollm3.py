# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: layers without a rotary embedding among those with one."""

from __future__ import annotations

from dataclasses import replace

from blink.errors import ConfigError
from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.layers import change_some, remove_rope
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    interval = config.integer("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval > 0) for layer in range(spec.num_layers)]
    has_rope = config.integers("no_rope_layers", usual)  # 1: the layer has one, whatever the name says
    if len(has_rope) < spec.num_layers:
        raise ConfigError(f"{config.place}: 'no_rope_layers' must say of each layer whether it rotates.")
    chosen = {layer for layer in range(spec.num_layers) if not has_rope[layer]}
    return replace(spec, layers=change_some(spec.layers, chosen, remove_rope))


FAMILIES = {
    "smollm3": Family(
        title="SmolLM3",
        defaults={"rope_theta": 2e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        adapt_config=_adapt_config,
    ),
}
