# SPDX-License-Identifier: Apache-2.0
"""Convert small models to GGUF, as llama.cpp's converter does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from blink.models.families import FAMILIES
from blink.models.layers import Attention
from blink.models.mlps import MoeMlp
from blink.models.rope import LinearScaling
from blink.models.spec import ModelSpec
from gguf_blocks import quantize

Kind = gguf.GGMLQuantizationType
INTERLEAVED = {gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE}
EXPERT_PARTS = {"mixtral": ("block_sparse_moe", ("w1", "w2", "w3"))}


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a head's rows as llama.cpp's converter does for llama: 0, half, 1, half + 1, ..."""
    size = weight.shape[0] // num_heads
    order = [row for i in range(size // 2) for row in (i, i + size // 2)]
    return torch.cat([head[order] for head in weight.split(size)])


def convert(
    directory: Path, path: Path, arch: gguf.MODEL_ARCH, spec: ModelSpec, kinds: Sequence[Kind] = (Kind.F32,)
) -> None:
    """Write a safetensors directory as GGUF, with the gguf package's own table of names.

    kinds: types of the matrices, in turn; what has no whole blocks stays float32.
    """
    attention, mlp = spec.attentions[0], spec.layers[0].mlp
    weights = {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}
    names = gguf.get_tensor_name_map(arch, spec.num_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(mlp.size)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(_last(spec).rope.theta)
    writer.add_rope_dimension_count(attention.rope.rotary_dim)
    writer.add_token_list([f"token {i}" for i in range(spec.vocab_size)])
    writer.add_eos_token_id(7)
    add_options(writer, spec)
    if isinstance(mlp, MoeMlp):
        place, parts = EXPERT_PARTS.get(spec.architecture, ("mlp", ("gate_proj", "up_proj", "down_proj")))
        writer.add_expert_count(mlp.experts)
        writer.add_expert_used_count(mlp.router.top_k)
        writer.add_expert_feed_forward_length(mlp.size)
        for layer in range(spec.num_layers):
            for part in parts:
                prefix = f"model.layers.{layer}.{place}.experts"
                stacked = [weights.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(mlp.experts)]
                weights[f"{prefix}.{part}.weight"] = torch.stack(stacked)
    turns = itertools.cycle(kinds)
    for name, value in weights.items():
        if FAMILIES[spec.architecture].shifted_norms and name.endswith("norm.weight"):
            value = value + 1
        if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            value = interleave(value, attention.heads if "q_proj" in name else attention.kv_heads)
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None
        kind = next(turns)
        if value.ndim == 1 or "gate_inp" in stored or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Kind.F32
        writer.add_tensor(stored, quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _last(spec: ModelSpec) -> Attention:
    """Return the last layer's attention: that without a window, where some have one."""
    attention = spec.layers[-1].mixer.attention
    assert attention is not None
    return attention


def add_options(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write what a family adds, under the names that llama.cpp's converter uses."""
    attention = _last(spec)
    rope = attention.rope
    if window := max(attention.window for attention in spec.attentions):
        writer.add_sliding_window(window)
    if attention.softcap:
        writer.add_attn_logit_softcapping(attention.softcap)
        writer.add_final_logit_softcapping(spec.logits_softcap)
    if spec.architecture == "granite":
        assert attention.scale is not None
        writer.add_attention_scale(attention.scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.layers[0].residual_scale)
        writer.add_logit_scale(spec.logits_divisor)
    if rope.long_divisors:
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_len)
        writer.add_rope_scaling_attn_factors(rope.magnitude)
        writer.add_tensor("rope_factors_short.weight", np.array(rope.divisors, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(rope.long_divisors, np.float32))
    elif rope.divisors:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
    if isinstance(rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.scaling.factor)
