# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5, dense: neighbouring components of a head are rotated as a pair."""

from __future__ import annotations

from blink.fields import Fields
from blink.models.families.base import Family
from blink.models.spec import ModelSpec


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    config.require(not config.flag("use_bias"), "use_bias")
    return spec


FAMILIES = {
    "ernie4_5": Family(
        title="Ernie 4.5",
        defaults={"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "tie_word_embeddings": True},
        adapt_config=_adapt_config,
        rotates_pairs=True,
        gguf="ernie4_5",
        is_interleaved=True,
    ),
}
