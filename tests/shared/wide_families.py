# SPDX-License-Identifier: Apache-2.0
"""The small models of each family with heads and experts for more than two ranks."""

from __future__ import annotations

from typing import Any

from model_families import FAMILIES, MXFP4, SMALL

_HEADS, _KEY_HEADS, _EXPERTS = 8, 4, 8
# Experts of which four ranks, or eight, have parts; all others are dealt whole.
_PARTED = {"qwen3_moe": "moe_intermediate_size", "glm4_moe": "moe_intermediate_size", MXFP4: "intermediate_size"}
_PARTED_WIDTH = 256
# Families whose heads are as wide as the hidden size says.
_HEAD_DIMS = {"phi3": 32, "opt": 16}


def widen(name: str, ranks: int) -> dict[str, Any]:
    """Return what changes in a family's config for so many ranks: 8 query heads, 4 of keys, and 8 experts at least.

    Where ranks are more than heads of keys, each has a copy of one. Recurrent layers have 4 key heads, or one a rank.
    """
    values = SMALL | FAMILIES[name]
    changes: dict[str, Any] = {"num_attention_heads": _HEADS}
    if values["num_key_value_heads"] is not None:
        changes["num_key_value_heads"] = _HEADS if "kv_lora_rank" in values else _KEY_HEADS
    if values["model_type"] in _HEAD_DIMS:
        changes["hidden_size"] = _HEADS * _HEAD_DIMS[values["model_type"]]
    if "linear_num_key_heads" in values:
        changes["linear_num_key_heads"] = max(_KEY_HEADS, ranks)
        changes["linear_num_value_heads"] = 2 * changes["linear_num_key_heads"]
    if values.get("mamba_n_groups", 1) > 1:
        changes["mamba_n_groups"] = ranks
    if values.get("num_local_experts"):
        changes["num_local_experts"] = _EXPERTS
    if name in _PARTED:
        changes[_PARTED[name]] = _PARTED_WIDTH
    return changes
