# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS: biases of queries, keys and values alone."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    has_bias = config.flag("attention_out_bias")
    return spec.with_attention(lambda attention: replace(attention, output_bias=has_bias))


FAMILIES = {
    "seed_oss": Family(
        title="Seed-OSS",
        defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "head_dim": 128, "attention_bias": True},
        adapt_config=_adapt_config,
        gguf="seed_oss",
    ),
}
