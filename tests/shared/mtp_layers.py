# SPDX-License-Identifier: Apache-2.0
"""Layers that predict one token further (MTP): random ones for a model of transformers, and a plain computation.

Transformers leaves them out, so the computation is written from the publications: Qwen3-Next's model card, whose form
of DeepSeek-V3's idea (https://arxiv.org/abs/2412.19437) has a gate for each attended number and one shared embedding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import Tensor

MTP = "mtp."
_LAYER = "mtp.layers.0."


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a directory's tensors in float32, by Llama's names."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {name.replace("language_model.", ""): each.float() for name, each in load_file(file).items()}
    return found


def read_text_config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    return config.get("text_config", config)


def draw_mtp(path: Path, seed: int) -> dict[str, Tensor]:
    """Return random tensors of a layer like the model's one with attention."""
    draw, config = torch.Generator().manual_seed(seed), read_text_config(path)
    index, hidden = config["layer_types"].index("full_attention"), config["hidden_size"]
    prefix = f"model.layers.{index}."
    shapes = {
        name.replace(prefix, _LAYER): each.shape for name, each in read_tensors(path).items() if name.startswith(prefix)
    }
    shapes |= {f"{MTP}{name}.weight": torch.Size([hidden]) for name in ("norm", *_INPUT_NORMS)}
    shapes[f"{MTP}fc.weight"] = torch.Size([hidden, 2 * hidden])

    def draw_one(shape: torch.Size) -> Tensor:
        values = torch.randn(shape, generator=draw)
        return 0.3 * values if len(shape) == 1 else 1.5 * values / math.sqrt(shape[-1])

    return {name: draw_one(shape) for name, shape in shapes.items()}


_INPUT_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")


def add_mtp(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors beside a model's own."""
    file, index = "mtp.safetensors", path / "model.safetensors.index.json"
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / file)
    if index.exists():
        listed = json.loads(index.read_text())
        listed["weight_map"] |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps(listed))


@dataclass
class MtpReference:
    """The layer over a whole text at once, in float32."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]  # of the model, and of the layer

    def draft(self, hidden: Tensor, text: list[int], count: int) -> list[int]:
        """Return the draft behind a text; hidden: the model's behind its last norm, of all tokens but the last."""
        inputs, ids, found = hidden, text[1:], list[int]()
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        while True:
            out = self._run(inputs, ids)
            found.append(int(functional.linear(out[-1], head).argmax()))
            if len(found) == count:
                return found
            inputs, ids = torch.cat((inputs, out[-1:])), [*ids, found[-1]]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the norm of vectors; weights are stored minus 1."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.tensors[f"{name}.weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _run(self, hidden: Tensor, ids: list[int]) -> Tensor:
        embedded = self.norm(self.tensors["model.embed_tokens.weight"][ids], f"{MTP}pre_fc_norm_embedding")
        pair = torch.cat((embedded, self.norm(hidden, f"{MTP}pre_fc_norm_hidden")), dim=1)
        residual = self._linear(pair, f"{MTP}fc")
        residual = residual + self._attend(self.norm(residual, f"{_LAYER}input_layernorm"))
        inner = self.norm(residual, f"{_LAYER}post_attention_layernorm")
        mix = self._mix if f"{_LAYER}mlp.gate.weight" in self.tensors else self._run_mlp
        return self.norm(residual + mix(inner, f"{_LAYER}mlp"), f"{MTP}norm")

    def _attend(self, x: Tensor) -> Tensor:
        config, block = self.config, f"{_LAYER}self_attn"
        heads, groups, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query, gate = self._linear(x, f"{block}.q_proj").view(len(x), heads, 2, size).unbind(2)
        key, value = (self._linear(x, f"{block}.{name}_proj").view(len(x), groups, size) for name in "kv")
        query, key = self.norm(query, f"{block}.q_norm"), self.norm(key, f"{block}.k_norm")
        query, key, value = (part.transpose(0, 1) for part in (self._rotate(query), self._rotate(key), value))
        key, value = (part.repeat_interleave(heads // groups, 0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / size**0.5
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1) * gate.sigmoid()
        return self._linear(attended.flatten(1), f"{block}.o_proj")

    def _rotate(self, heads: Tensor) -> Tensor:
        """Rotate the first part of [positions, heads, size] by halves."""
        rope = self.config["rope_parameters"]
        size = int(heads.shape[-1] * rope["partial_rotary_factor"])
        rates = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(len(heads))[:, None] * rates)[:, None]
        first, second, rest = heads.split([size // 2, size // 2, heads.shape[-1] - size], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _run_mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(functional.silu(gate) * up, f"{name}.down_proj")

    def _mix(self, x: Tensor, name: str) -> Tensor:
        """Add up the experts that each token has, by renormalised chances, and that of all tokens by its gate."""
        chances = self._linear(x, f"{name}.gate").softmax(-1)
        weights, chosen = chances.topk(self.config["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        out = self._linear(x, f"{name}.shared_expert_gate").sigmoid() * self._run_mlp(x, f"{name}.shared_expert")
        for token, (of, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            for weight, expert in zip(of, experts, strict=True):
                out[token] += weight * self._run_mlp(x[token], f"{name}.experts.{expert}")
        return out


LAYERS = ("linear_attention", "full_attention", "linear_attention")
_SHARPNESS = 8.0  # of logits
_CLOCKWORK: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": len(LAYERS),
    "layer_types": [*LAYERS],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


# Sizes that kernels for few rows and for FP8 take.
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def write_clockwork(folder: Path, vocab_size: int, *, noise: float, seed: int = 5, **changes: Any) -> Path:
    """Write a model whose tokens have one successor each, which its own layer predicts.

    noise: how much of what its layers add; 0: nothing. So with some its states decide where the text goes another way,
    which the layer does not know. changes: of its config.
    """
    draw, config = torch.Generator().manual_seed(seed), _CLOCKWORK | changes | {"vocab_size": vocab_size}
    hidden = config["hidden_size"]
    embedding = functional.normalize(torch.randn(vocab_size, hidden, generator=draw), dim=1)
    lm_head = torch.empty_like(embedding)
    lm_head[torch.randperm(vocab_size, generator=draw)] = _SHARPNESS * embedding
    zeros = torch.zeros(hidden)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head, "model.norm.weight": zeros}
    for index, kind in enumerate(LAYERS):
        tensors |= _draw_layer(f"model.layers.{index}.", kind, noise / hidden**0.5, draw, config)
    tensors |= _draw_layer(_LAYER, "full_attention", 0, draw, config)
    fusion = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    norms = {f"{MTP}{name}.weight": zeros.clone() for name in ("norm", *_INPUT_NORMS)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | norms | {f"{MTP}fc.weight": fusion}, folder / "model.safetensors")
    return folder


def _draw_layer(
    prefix: str, kind: str, scale: float, draw: torch.Generator, config: dict[str, Any]
) -> dict[str, Tensor]:
    """Return a layer; scale: of the matrices of what it adds."""
    hidden, inner, size = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    shapes = {"q_proj": (2 * queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes |= {"o_proj": (hidden, queries), "q_norm": (size,), "k_norm": (size,)}
    key_heads, heads = (config[f"linear_num_{name}_heads"] for name in ("key", "value"))
    keys, values = key_heads * config["linear_key_head_dim"], heads * config["linear_value_head_dim"]
    if kind == "linear_attention":
        shapes = {"in_proj_qkv": (2 * keys + values, hidden), "in_proj_z": (values, hidden)}
        shapes |= {"out_proj": (hidden, values), "norm": (config["linear_value_head_dim"],)}
        shapes |= {"in_proj_b": (heads, hidden), "in_proj_a": (heads, hidden), "conv1d": (2 * keys + values, 1, 4)}
    block = "linear_attn" if kind == "linear_attention" else "self_attn"
    named = {f"{block}.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
    named |= {"mlp.down_proj.weight": (hidden, inner)}
    found = {name: torch.randn(shape, generator=draw) * 0.4 for name, shape in named.items()}
    for name in ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight"):
        if name in found:
            found[name] *= scale / 0.4
    norms = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), torch.zeros(hidden))
    if kind == "linear_attention":
        found["linear_attn.A_log"] = torch.randn(heads, generator=draw) - 2
        found["linear_attn.dt_bias"] = torch.zeros(heads)
    return {prefix + name: each.clone() for name, each in (found | norms).items()}
