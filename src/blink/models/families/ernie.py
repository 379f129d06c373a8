# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5, dense and with experts: neighbouring components of a head are rotated as a pair."""

from __future__ import annotations

from blink.fields import Fields
from blink.models.families.base import ExpertNames, Family
from blink.models.families.routed import make_dense, set_router
from blink.models.spec import ModelSpec

_MAX_NORM_MIN = 1e-9  # a sum of chosen probabilities is above it, so it never counts


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    config.require(not config.flag("use_bias"), "use_bias")
    return spec


def _adapt_mixture(spec: ModelSpec, config: Fields) -> ModelSpec:
    least = config.number("moe_norm_min", 1e-12)
    config.require(least <= _MAX_NORM_MIN, f"moe_norm_min of {least:g}")
    spec = set_router(_adapt_config(spec, config), has_bias=True)
    first, last = config.integer("moe_layer_start_index", 1, low=0), config.integer("moe_layer_end_index", -1, low=-1)
    step = config.integer("moe_layer_interval", 1)
    end = spec.num_layers if last < 0 else last + 1
    dense = {index for index in range(spec.num_layers) if not first <= index < end or (index + 1) % step}
    return make_dense(spec, config, dense)


_DEFAULTS = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
FAMILIES = {
    "ernie4_5": Family(
        title="Ernie 4.5",
        defaults={**_DEFAULTS, "head_dim": 128},
        adapt_config=_adapt_config,
        rotates_pairs=True,
        gguf="ernie4_5",
        is_interleaved=True,
    ),
    "ernie4_5_moe": Family(
        title="Ernie 4.5 MoE",
        defaults={
            **_DEFAULTS,
            "norm_topk_prob": True,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
        },
        config_names={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"},
        adapt_config=_adapt_mixture,
        rotates_pairs=True,
        experts=ExpertNames(
            shared="shared_experts",
            shared_count="moe_num_shared_experts",
            choice_bias="moe_statics.e_score_correction_bias",
            is_choice_bias_row=True,
        ),
    ),
}
