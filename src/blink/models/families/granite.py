# SPDX-License-Identifier: Apache-2.0
"""Granite 3: four factors, of scores, embeddings, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    spec = spec.with_attention(lambda attention: attention.with_scale(config.number("attention_multiplier", 1.0)))
    residual_scale = config.number("residual_multiplier", 1.0)
    return replace(
        spec.with_layers(lambda layer: replace(layer, residual_scale=residual_scale)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0, low=1e-6),
    )


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
}
