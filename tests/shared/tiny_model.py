# SPDX-License-Identifier: Apache-2.0
"""A model that boots in a second: a single small layer with random weights and the default model's vocabulary.

Its output weights are not those of its input: so greedy tokens look random, and each depends on those before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
BLOCK_BYTES = 2 * 16 * 16 * 2  # of KV cache, for one layer and head: keys and values, tokens, head_dim, float16


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write the model's config, its only file: use it with load_format "dummy" and a tokenizer of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder
