# SPDX-License-Identifier: Apache-2.0
"""A plain decoder that gradients pass through: whole texts, no KV cache, weights by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.errors import ConfigError
from blink.kernels.rotary import make_rotary_table
from blink.models.families import FAMILIES
from blink.models.layers import Attention
from blink.models.rope import Rope
from blink.models.spec import ModelSpec
from blink.models.weights.quantized_checkpoint import OUTPUT

Weights = Mapping[str, Tensor]  # float32

EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


def check_differentiable(spec: ModelSpec) -> None:
    """Check that a model is one of those that are computed here.

    Raises:
        ConfigError: it has experts, windows or other things that Llama, Qwen 2 and Qwen 3 do not have.
    """
    family = FAMILIES[spec.architecture]
    options = spec.options_beyond("tie_embeddings", "quantization")
    for layer in spec.distinct_layers:
        options += layer.options_beyond() + layer.mlp.options_beyond()
        options += ["recurrence"] if layer.mixer.attention is None else []
    for attention in spec.attentions:
        options += attention.options_beyond("qk_norm", "qkv_bias", "output_bias")
        options += ["qk_norm"] if attention.qk_norm == "all_heads" else []
    is_plain = not (family.is_qkv_fused or family.shifted_norms or family.rotates_pairs)
    if options or spec.mixture is not None or not is_plain:
        raise ConfigError(f"--tune is for models like Llama, Qwen 2 and Qwen 3, not for {spec.architecture} as it is.")


def compute_logits(spec: ModelSpec, weights: Weights, ids: Tensor) -> Tensor:
    """Return the logits [texts, tokens, vocab] of all tokens of texts of one length; ids: [texts, tokens]."""
    attentions = list(filter(None, (layer.mixer.attention for layer in spec.layers)))  # all: see above
    hidden = functional.embedding(ids, weights[EMBEDDING])
    rotations = {one.rope: _make_rotations(one.rope, ids) for one in {*attentions}}
    for index, attention in enumerate(attentions):
        prefix = f"model.layers.{index}"
        normed = _norm(spec, weights, f"{prefix}.input_layernorm", hidden)
        hidden = hidden + _attend(spec, weights, prefix, normed, attention, rotations[attention.rope])
        hidden = hidden + _run_mlp(weights, prefix, _norm(spec, weights, f"{prefix}.post_attention_layernorm", hidden))
    head = weights[EMBEDDING if spec.tie_embeddings else OUTPUT]
    return functional.linear(_norm(spec, weights, "model.norm", hidden), head)


def _make_rotations(rope: Rope, ids: Tensor) -> Tensor:
    return make_rotary_table(rope.frequencies(), ids.shape[1], ids.device, rope.magnitude)


def _norm(spec: ModelSpec, weights: Weights, name: str, x: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"]
    return functional.rms_norm(x, weight.shape, weight, spec.rms_norm_eps)


def _attend(
    spec: ModelSpec, weights: Weights, prefix: str, x: Tensor, attention: Attention, rotation: Tensor
) -> Tensor:
    """Return what attention adds for its normalised inputs [texts, tokens, hidden]."""
    names = [f"{prefix}.self_attn.{name}" for name in ("q", "k", "v")]
    query, key, value = (
        _multiply(weights, f"{name}_proj", x).unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for name in names
    )
    if attention.qk_norm == "head":
        query, key = (_norm(spec, weights, f"{name}_norm", y) for name, y in zip(names, (query, key), strict=False))
    # Repeated, since PyTorch's kernels of 32 bits for GPUs take no grouped queries.
    key, value = (y.repeat_interleave(attention.group, dim=1) for y in (_rotate(key, rotation), value))
    attended = functional.scaled_dot_product_attention(_rotate(query, rotation), key, value, is_causal=True)
    return _multiply(weights, f"{prefix}.self_attn.o_proj", attended.transpose(1, 2).flatten(2))


def _multiply(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the first components of heads [texts, heads, tokens, head_dim] by a rotary table [tokens, rotary_dim]."""
    cos, sin = rotation.chunk(2, dim=1)
    first, second, rest = x.split([cos.shape[1], cos.shape[1], x.shape[3] - rotation.shape[1]], dim=3)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=3)


def _run_mlp(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up = (_multiply(weights, f"{prefix}.mlp.{name}_proj", x) for name in ("gate", "up"))
    return _multiply(weights, f"{prefix}.mlp.down_proj", functional.silu(gate) * up)
