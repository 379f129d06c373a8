# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention sinks, and experts with biases whose gates are clipped."""

from __future__ import annotations

from blink.fields import Fields
from blink.models.families.base import ExpertNames, Family
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    limits = (config.number("swiglu_alpha"), config.number("swiglu_limit"))
    config.require(limits == (1.702, 7.0), f"swiglu_alpha and swiglu_limit of {limits}")  # clipped_silu has these
    return spec


FAMILIES = {
    "gpt_oss": Family(
        title="gpt-oss",
        defaults={
            "rope_theta": 150000.0,
            "attention_bias": True,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        adapt_config=_adapt_config,
        sinks=True,
        activation="clipped_silu",
        window_period=2,
        experts=ExpertNames(are_joined=True),
    ),
}
