# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to 4.7, whose experts are chosen by sigmoids and a bias, and GLM-4.7-Flash with latent attention."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields
from blink.models.families.base import ExpertNames, Family
from blink.models.families.latent import LATENT_NAMES, make_latent
from blink.models.families.routed import (
    make_first_dense,
    make_listed_dense,
    set_gguf_router,
    set_sigmoid_router,
)
from blink.models.spec import ModelSpec

_EXPERTS = ExpertNames(
    shared="shared_experts", shared_count="n_shared_experts", choice_bias="gate.e_score_correction_bias"
)
_ROUTED = {"norm_topk_prob": True, "n_shared_experts": 1, "rms_norm_eps": 1e-5}


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    qk_norm = "head" if config.flag("use_qk_norm") else "none"
    spec = spec.with_attention(lambda attention: replace(attention, qk_norm=qk_norm, output_bias=False))
    return make_first_dense(set_sigmoid_router(spec, config), config, default=1)


def _adapt_flash(spec: ModelSpec, config: Fields) -> ModelSpec:
    return make_listed_dense(set_sigmoid_router(make_latent(spec, config), config), config, default=1)


FAMILIES = {
    "glm4_moe": Family(
        title="GLM-4.5, 4.6, 4.7",
        defaults={**_ROUTED, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0},
        config_names={"n_routed_experts": "num_experts"},
        adapt_config=_adapt_config,
        experts=_EXPERTS,
        gguf="glm4moe",
        adapt_gguf=set_gguf_router,
    ),
    "glm4_moe_lite": Family(
        title="GLM-4.7-Flash",
        defaults={
            **_ROUTED,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512,
            "head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        config_names={**LATENT_NAMES, "n_routed_experts": "num_experts"},
        adapt_config=_adapt_flash,
        rotates_pairs=True,
        experts=_EXPERTS,
    ),
}
