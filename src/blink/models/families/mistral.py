# SPDX-License-Identifier: Apache-2.0
"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping

from blink.models.families.base import EVERY_LAYER, ExpertNames, Family

_DEFAULTS: Mapping[str, object] = {"sliding_window": 4096, "rope_theta": 10000.0}

FAMILIES = {
    "mistral": Family(title="Mistral", defaults=_DEFAULTS, window_period=EVERY_LAYER),
    "ministral": Family(title="Ministral", defaults=_DEFAULTS, window_period=EVERY_LAYER),
    "mixtral": Family(
        title="Mixtral",
        defaults={"rope_theta": 1e6, "norm_topk_prob": True},
        window_period=EVERY_LAYER,
        experts=ExpertNames(block="block_sparse_moe", projections=("w1", "w3", "w2")),
        is_interleaved=True,  # in files of the architecture llama
    ),
}
