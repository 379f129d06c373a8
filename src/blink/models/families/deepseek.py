# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, V3, R1 and V3.1, and Kimi-K2, which is V3 of other sizes: latent attention, experts chosen in groups."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields, show
from blink.models.families.base import ExpertNames, Family
from blink.models.families.latent import LATENT_NAMES, make_gguf_latent, make_latent
from blink.models.families.routed import (
    make_first_dense,
    read_groups,
    set_gguf_router,
    set_router,
    set_sigmoid_router,
)
from blink.models.spec import ModelSpec

_DEFAULTS = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_NAMES = {**LATENT_NAMES, "n_routed_experts": "num_experts"}


def _adapt_v3(spec: ModelSpec, config: Fields) -> ModelSpec:
    spec = set_sigmoid_router(make_latent(spec, config), config)
    return make_first_dense(spec, config, default=3)


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    spec = set_gguf_router(make_gguf_latent(spec, metadata), metadata)
    assert spec.mixture is not None
    return spec if spec.mixture.router.score == "sigmoid" else replace(spec, architecture="deepseek_v2")


def _adapt_v2(spec: ModelSpec, config: Fields) -> ModelSpec:
    config.require(not config.flag("norm_topk_prob"), "norm_topk_prob")
    kind, method = config.text("scoring_func", "softmax"), config.text("topk_method", "greedy")
    config.require(kind == "softmax", f"scoring_func {show(kind)}")
    config.require(method in ("greedy", "group_limited_greedy"), f"topk_method {show(method)}")
    groups = {} if method == "greedy" else {**read_groups(config), "group_best": 1}
    scale = config.number("routed_scaling_factor", 1.0, low=1e-6)
    return make_first_dense(set_router(make_latent(spec, config), scale=scale, **groups), config, default=0)


FAMILIES = {
    "deepseek_v3": Family(
        title="DeepSeek-V3, R1, V3.1, Kimi-K2",
        defaults={
            **_DEFAULTS,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
        },
        also_known_as=("kimi_k2", "kimi_k25"),
        config_names=_NAMES,
        adapt_config=_adapt_v3,
        rotates_pairs=True,
        experts=ExpertNames(
            shared="shared_experts", shared_count="n_shared_experts", choice_bias="gate.e_score_correction_bias"
        ),
        gguf="deepseek2",
        gguf_others=("deepseek_v2", "glm4_moe_lite"),
        adapt_gguf=_adapt_gguf,
    ),
    "deepseek_v2": Family(
        title="DeepSeek-V2",
        defaults={**_DEFAULTS, "n_shared_experts": 2},
        config_names=_NAMES,
        adapt_config=_adapt_v2,
        rotates_pairs=True,
        experts=ExpertNames(shared="shared_experts", shared_count="n_shared_experts"),
    ),
}
