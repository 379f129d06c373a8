# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4: four factors, of scores, embeddings, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields, show
from blink.models.families.base import Family
from blink.models.layers import remove_rope
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    spec = spec.with_attention(lambda attention: attention.with_scale(config.number("attention_multiplier", 1.0)))
    residual_scale = config.number("residual_multiplier", 1.0)
    return replace(
        spec.with_layers(lambda layer: replace(layer, residual_scale=residual_scale)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0, low=1e-6),
    )


def _adapt_hybrid(spec: ModelSpec, config: Fields) -> ModelSpec:
    unknown = sorted({*config.texts("layer_types", ["linear_attention"])} - {"attention", "full_attention"})
    config.require(not unknown, f"a layer of type {show(unknown[0] if unknown else None)}")
    config.require(config.integer("num_local_experts", 8, low=0) == 0, "a mixture of experts beside a shared one")
    kind = config.text("position_embedding_type", "nope")
    config.require(kind in ("rope", "nope"), f"a position embedding of type {show(kind)}")
    spec = _adapt_config(spec, config)
    return spec if kind == "rope" else spec.with_layers(remove_rope)


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    # 0 stands for what is not there.
    scale, residual_scale = metadata.number("attention.scale", 0.0), metadata.number("residual_scale", 0.0)
    spec = spec.with_attention(lambda attention: replace(attention, scale=scale or None))
    return replace(
        spec.with_layers(lambda layer: replace(layer, residual_scale=residual_scale or 1.0)),
        embedding_scale=metadata.number("embedding_scale", 0.0) or 1.0,
        logits_divisor=metadata.number("logit_scale", 0.0) or 1.0,
    )


FAMILIES = {
    "granite": Family(
        title="Granite 3",
        defaults={"rope_theta": 10000.0},
        adapt_config=_adapt_config,
        gguf="granite",
        is_interleaved=True,
        adapt_gguf=_adapt_gguf,
    ),
    "granitemoehybrid": Family(
        title="Granite 4 (dense)",
        defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6},
        config_names={"shared_intermediate_size": "intermediate_size"},
        adapt_config=_adapt_hybrid,
        is_gate_up_fused=True,
        tensor_names={"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"},
    ),
}
