# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: experts chosen by sigmoids and a bias, in all layers."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields, show
from blink.models.families.base import ExpertNames, Family
from blink.models.families.routed import set_router
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    kind = config.text("scoring_func", "sigmoid")
    config.require(kind == "sigmoid", f"scoring_func {show(kind)}")
    config.require(config.flag("use_qk_norm", True), "attention without norms of queries and keys")
    if config.has("rotary_dim"):
        size = config.integer("rotary_dim")
        spec = spec.with_attention(lambda attention: replace(attention, rope=replace(attention.rope, rotary_dim=size)))
    return set_router(spec, score="sigmoid", has_bias=True)


FAMILIES = {
    "minimax_m2": Family(
        title="MiniMax-M2",
        defaults={"head_dim": 128, "rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": True},
        adapt_config=_adapt_config,
        qk_norm="all_heads",
        experts=ExpertNames(
            block="block_sparse_moe", projections=("w1", "w3", "w2"), choice_bias="e_score_correction_bias"
        ),
    ),
}
