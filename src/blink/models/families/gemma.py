# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and 3: norms on both sides, capped scores, embeddings that are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.layers import Attention, LayerSpec
from blink.models.spec import ModelSpec

_DEFAULTS: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# Head sizes say how scores are scaled, but of the largest models, which GGUF files do not say.
_LAYERS_OF_LARGEST = {"gemma2": 46, "gemma3_text": 62}


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    return _add_caps(spec, config).with_attention(
        lambda attention: attention.with_scale(config.number("query_pre_attn_scalar", low=1e-6) ** -0.5)
    )


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    def adapt(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=replace(layer.mlp, activation="gelu_tanh"))

    def scale(attention: Attention) -> Attention:
        if spec.num_layers != _LAYERS_OF_LARGEST[spec.architecture]:
            return attention
        return replace(attention, scale=(spec.hidden_size / attention.heads) ** -0.5)

    return _add_caps(spec, metadata).with_layers(adapt).with_attention(scale)


def _add_caps(spec: ModelSpec, fields: Fields) -> ModelSpec:
    softcap = fields.number("attn_logit_softcapping", 0.0)
    spec = spec.with_attention(lambda attention: replace(attention, softcap=softcap))
    return replace(
        spec,
        embedding_scale=math.sqrt(spec.hidden_size),
        logits_softcap=fields.number("final_logit_softcapping", 0.0),
    )


FAMILIES = {
    "gemma2": Family(
        title="Gemma 2",
        defaults={
            **_DEFAULTS,
            "rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        adapt_config=_adapt_config,
        norms="both",
        window_period=2,
        shifted_norms=True,
        gguf="gemma2",
        adapt_gguf=_adapt_gguf,
    ),
    "gemma3_text": Family(
        title="Gemma 3 (text)",
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        also_known_as=("gemma3",),
        adapt_config=_adapt_config,
        norms="both",
        qk_norm="head",
        window_period=6,
        shifted_norms=True,
        gguf="gemma3",
        gguf_local_theta=10000.0,
        adapt_gguf=_adapt_gguf,
    ),
}
