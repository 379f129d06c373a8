# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 draft heads in the forms of EAGLE and speculators, and a model whose text a head can know.

In that model each token has one successor, by a permutation: its layers add nothing to the embeddings. Its head attends
to the newest token alone, so it drafts what the model generates, as far as the head's vocabulary has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 16, 48
_FOCUS = 24.0  # of queries and keys that are to see their own token alone
_SHARPNESS = 8.0  # of the model's logits


def draw_head(
    vocab_size: int, tokens: Sequence[int], *, seed: int, num_layers: int = 3, target_hidden: int = HIDDEN
) -> dict[str, Tensor]:
    """Return the tensors of a random head that drafts some of the model's tokens, by EAGLE's names."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=draw)

    chosen = torch.tensor(sorted(tokens))
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[chosen] = True
    return {
        "embed_tokens.weight": torch.randn(vocab_size, HIDDEN, generator=draw),
        "fc.weight": matrix(HIDDEN, num_layers * target_hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": 2 * matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": 2 * matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "norm.weight": norm(),
        "lm_head.weight": matrix(len(tokens), HIDDEN),
        "d2t": chosen - torch.arange(len(tokens)),
        "t2d": kept,
    }


def write_head(
    folder: Path, tensors: Mapping[str, Tensor], layers: Sequence[int], *, by_speculators: bool = False, **changes: Any
) -> Path:
    """Write a head that reads some of the model's layers."""
    layer = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": len(tensors["t2d"]),
    }
    own = {"draft_vocab_size": len(tensors["d2t"])} | changes
    ids = {"eagle_aux_hidden_state_layer_ids": [*layers]}
    if by_speculators:
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **own, **ids}
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own, "eagle_config": ids}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_clockwork(folder: Path, vocab_size: int, tokens: Sequence[int], *, num_layers: int = 2) -> tuple[Path, Path]:
    """Write the model whose tokens have one successor each, and the head that knows it of some tokens; return both."""
    draw = torch.Generator().manual_seed(5)
    embedding = torch.nn.functional.normalize(torch.randn(vocab_size, HIDDEN, generator=draw), dim=1)
    embedding[:, 0] = 1.0  # by which queries and keys of the head find themselves
    directions = torch.nn.functional.normalize(embedding, dim=1)
    successors = torch.randperm(vocab_size, generator=draw)
    lm_head = torch.empty_like(embedding)
    lm_head[successors] = _SHARPNESS * directions
    model = {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head, "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(num_layers):
        model |= _draw_silent_layer(f"model.layers.{index}", draw)
    target = folder / "model"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(_describe_clockwork(vocab_size, num_layers)))
    save_file(model, target / "model.safetensors")
    head = draw_head(vocab_size, tokens, seed=6) | {"embed_tokens.weight": embedding.clone()}
    _teach(head, lm_head, tokens)
    return target, write_head(folder / "head", head, (0, 0, 1), norm_before_residual=True)


def _teach(head: dict[str, Tensor], lm_head: Tensor, tokens: Sequence[int]) -> None:
    """Let a head make of the newest token what the model does."""
    ones = ("midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight", "norm.weight")
    head.update(dict.fromkeys(ones, torch.ones(HIDDEN)))
    zeros = ("midlayer.hidden_norm.weight", "midlayer.mlp.down_proj.weight", "fc.weight")
    head.update({name: torch.zeros_like(head[name]) for name in zeros})
    for name in ("q_proj", "k_proj"):
        weight = torch.zeros_like(head[f"midlayer.self_attn.{name}.weight"])
        weight[:, 0] = _FOCUS / math.sqrt(HIDDEN / 2)
        head[f"midlayer.self_attn.{name}.weight"] = weight
    values, output = torch.zeros(HIDDEN, 2 * HIDDEN), torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    values[:, :HIDDEN] = torch.eye(HIDDEN)
    for part in range(KV_HEADS):  # of what the query heads of a group see alike, the first one's
        rows, columns = part * HEAD_DIM, part * HEADS // KV_HEADS * HEAD_DIM
        output[rows : rows + HEAD_DIM, columns : columns + HEAD_DIM] = torch.eye(HEAD_DIM)
    head["midlayer.self_attn.v_proj.weight"], head["midlayer.self_attn.o_proj.weight"] = values, output
    head["lm_head.weight"] = lm_head[torch.tensor(sorted(tokens))]


def _draw_silent_layer(prefix: str, draw: torch.Generator) -> dict[str, Tensor]:
    """Return a layer that adds nothing: its last matrices are zeros."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * 0.1

    return {
        f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
    }


def _describe_clockwork(vocab_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
