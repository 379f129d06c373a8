# SPDX-License-Identifier: Apache-2.0
"""Models with multi-head latent attention (MLA): what several makers' families share."""

from __future__ import annotations

import math
from dataclasses import replace

from blink.fields import Fields
from blink.models.latent import Latent
from blink.models.layers import Attention
from blink.models.rope_json import read_score_growth
from blink.models.spec import ModelSpec

# config.json's name of what is rotated of a head, which other families rotate whole.
LATENT_NAMES = {"qk_rope_head_dim": "head_dim"}


def make_latent(spec: ModelSpec, config: Fields) -> ModelSpec:
    """Return a model whose attention is latent: one head of keys, of which values are a part."""
    config.require(not config.flag("attention_bias"), "attention_bias")
    config.require(config.flag("rope_interleave", True), "rotation of halves")

    def change(attention: Attention) -> Attention:
        latent = Latent(
            rank=config.integer("kv_lora_rank"),
            rope=attention.head_dim,
            nope=config.integer("qk_nope_head_dim"),
            value=config.integer("v_head_dim"),
            query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else 0,
        )
        scale = latent.scale * read_score_growth(config)
        return replace(attention, kv_heads=1, head_dim=latent.kept, scale=scale, latent=latent)

    return spec.with_attention(change)


def make_gguf_latent(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    """Return the same of a GGUF file, which describes attention with one head of keys or, if it is old, with many."""
    query = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length"))
    rope = metadata.integer("rope.dimension_count")
    metadata.require(rope < query, f"queries of {query} numbers, {rope} of them rotated")
    latent = Latent(
        rank=metadata.integer("attention.kv_lora_rank"),
        rope=rope,
        nope=query - rope,
        value=metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length")),
        query_rank=metadata.integer("attention.q_lora_rank", 0, low=0),
    )
    # A tenth of YaRN's mscale_all_dim, in float32.
    slope = round(metadata.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
    factor = metadata.number("rope.scaling.factor", 1.0)
    scale = latent.scale * (slope * math.log(max(factor, 1.0)) + 1) ** 2

    def change(attention: Attention) -> Attention:
        assert attention.rope is not None
        rope = replace(attention.rope, magnitude=1.0)
        return replace(attention, kv_heads=1, head_dim=latent.kept, scale=scale, latent=latent, rope=rope)

    return spec.with_attention(change)
