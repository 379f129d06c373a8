# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models of 2025 and 2026: a small one of each family for transformers, and published ones of Qwen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_families import FAMILIES, SMALL, YARN_ROPE

_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_SIX = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": _SIX,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
}
# Beside SMALL; those that run have theirs in model_families.py.
_OTHERS: dict[str, dict[str, Any]] = {
    "gemma4-ple": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_ROUTED,
        **_GROUPS,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT, **_ROUTED, **_GROUPS},
    "deepseek_v32": {"model_type": "deepseek_v32", **_LATENT, **_ROUTED, **_GROUPS, "index_topk": 16},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_LATENT, **_ROUTED, **_GROUPS, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 3},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8, "rope_parameters": YARN_ROPE},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "seed_oss": {"model_type": "seed_oss"},
    "ministral3": {"model_type": "ministral3", "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.1}},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 48,
    },
    "llama4_text": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "floor_scale": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 80,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.3,
    },
}
_QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
SMALL_CONFIGS = {name: SMALL | FAMILIES[name] for name in _QWEN} | {
    name: SMALL | values for name, values in _OTHERS.items()
}

_FACTS = json.loads((Path(__file__).parents[1] / "unit" / "model_facts.json").read_text())
_DENSE_35: dict[str, Any] = _FACTS["qwen3.6-27b, of pictures too"]["config"]


def _dense(hidden: int, size: int, *, ties: bool) -> dict[str, Any]:
    """A published dense Qwen 3.5 of 32 layers."""
    changes = {
        "num_hidden_layers": 32,
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": ties,
    }
    return {**_DENSE_35, "tie_word_embeddings": ties, "text_config": {**_DENSE_35["text_config"], **changes}}


PUBLISHED = {
    "Qwen3-VL-2B": _FACTS["qwen3-vl-2b, of pictures too"]["config"],
    "Qwen3-VL-30B-A3B": _FACTS["qwen3-vl-30b-a3b, of pictures too"]["config"],
    "Qwen3-Next-80B-A3B": _FACTS["qwen3-next-80b-a3b"]["config"],
    "Qwen3.5-4B": _dense(2560, 9216, ties=True),
    "Qwen3.5-9B": _dense(4096, 12288, ties=False),
    "Qwen3.6-27B": _DENSE_35,
    "Qwen3.6-35B-A3B": _FACTS["qwen3.6-35b-a3b, of pictures too"]["config"],
}
