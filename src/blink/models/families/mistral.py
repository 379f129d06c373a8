# SPDX-License-Identifier: Apache-2.0
"""Mistral, Ministral and Mixtral, and the text of those that see pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blink.fields import Fields
from blink.models.families.base import EVERY_LAYER, ExpertNames, Family
from blink.models.layers import QueryGrowth
from blink.models.spec import ModelSpec

_DEFAULTS: Mapping[str, object] = {"sliding_window": 4096, "rope_theta": 10000.0}

_YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    slope = metadata.number("attention.temperature_scale", 0.0)
    if not slope:  # Mistral Small
        return spec
    growth = QueryGrowth(slope, metadata.integer("rope.scaling.original_context_length"))
    return spec.with_attention(lambda attention: replace(attention, query_growth=growth))


FAMILIES = {
    "ministral3": Family(
        title="Ministral 3",
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN},
        also_known_as=("mistral3",),
        window_period=EVERY_LAYER,
        gguf="mistral3",
        is_interleaved=True,
        adapt_gguf=_adapt_gguf,
    ),
    # Behind Ministral 3: a model that sees pictures and does not say what its text is has this one.
    "mistral": Family(
        title="Mistral",
        defaults=_DEFAULTS,
        also_known_as=("mistral3",),
        window_period=EVERY_LAYER,
    ),
    "ministral": Family(title="Ministral", defaults=_DEFAULTS, window_period=EVERY_LAYER),
    "mixtral": Family(
        title="Mixtral",
        defaults={"rope_theta": 1e6, "norm_topk_prob": True},
        window_period=EVERY_LAYER,
        experts=ExpertNames(block="block_sparse_moe", projections=("w1", "w3", "w2")),
        is_interleaved=True,  # in files of the architecture llama
    ),
}
