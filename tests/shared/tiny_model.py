# SPDX-License-Identifier: Apache-2.0
"""A llama that boots in no time, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

from blink.config import ModelConfig

_CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head_dim, float32


def write_tiny_model(folder: Path) -> ModelConfig:
    """Write the model's description to the folder; return how to load it."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return ModelConfig(model=str(folder), load_format="dummy")
