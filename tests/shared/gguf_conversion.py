# SPDX-License-Identifier: Apache-2.0
"""Convert small models to GGUF, as llama.cpp's converter does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.gguf_writer import GGUFValue
from safetensors.torch import load_file

from benchmark_programs import load_benchmark
from blink.models.families import FAMILIES
from blink.models.latent import Latent
from blink.models.layers import Attention, GatedDeltaNet
from blink.models.mlps import MoeMlp
from blink.models.rope import LinearScaling
from blink.models.spec import ModelSpec
from gguf_blocks import quantize
from model_specs import attention_of

Kind = gguf.GGMLQuantizationType
# Whose heads a converter interleaves; those of Ernie 4.5 are so in its own files.
INTERLEAVED = {
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.MISTRAL3,
}
EXPERT_PARTS = {"mixtral": ("block_sparse_moe", ("w1", "w2", "w3"))}


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a head's rows as llama.cpp's converter does for llama: 0, half, 1, half + 1, ..."""
    size = weight.shape[0] // num_heads
    order = [row for i in range(size // 2) for row in (i, i + size // 2)]
    return torch.cat([head[order] for head in weight.split(size)])


def convert(
    directory: Path,
    path: Path,
    arch: gguf.MODEL_ARCH,
    spec: ModelSpec,
    kinds: Sequence[Kind] = (Kind.F32,),
    *,
    variant: str = "",
) -> None:
    """Write a safetensors directory as GGUF, with the gguf package's own table of names.

    kinds: types of the matrices, in turn; what has no whole blocks stays float32. variant: "joined" for experts' gates
    and ups in one tensor, "grouped" for qwen3next as it was first, "drafts" for a layer more than the model's, "whole"
    for latent attention as it was first.
    """
    attention = spec.attentions[0]
    weights, num_drafts = read_weights(directory, spec, variant), int(variant == "drafts")
    names = gguf.get_tensor_name_map(arch, spec.num_layers + num_drafts)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(spec.num_layers + num_drafts)
    if num_drafts:
        writer.add_nextn_predict_layers(num_drafts)
    load_benchmark("gguf_header").add_sizes(writer, spec)
    if variant == "whole" and attention.latent is not None:
        describe_heads(writer, attention.heads, attention.latent)
    writer.add_token_list([f"token {i}" for i in range(spec.vocab_size)])
    writer.add_eos_token_id(7)
    add_options(writer, spec)
    turns = itertools.cycle(kinds)
    for name, value in weights.items():
        is_shifted = FAMILIES[spec.architecture].shifted_norms and not name.endswith("linear_attn.norm.weight")
        if is_shifted and name.endswith("norm.weight"):
            value = value + 1
        if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            value = interleave(value, attention.heads if "q_proj" in name else attention.kv_heads)
        stored = names.get_name(name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
        assert stored is not None
        kind = next(turns)
        if value.ndim == 1 or "gate_inp" in stored or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Kind.F32
        writer.add_tensor(stored, quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(directory: Path, spec: ModelSpec, variant: str) -> dict[str, torch.Tensor]:
    """Return a directory's tensors with a layer more than the model's if `variant` says so, arranged as in GGUF."""
    weights = {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}
    if variant == "drafts":
        last = [name for name in weights if "layers.3." in name]
        weights |= {name.replace("layers.3.", "layers.4."): weights[name] for name in last}
    if spec.architecture == "granitemoehybrid":
        weights = split_shared_mlp(weights)
    recurrent = next((layer.mixer.recurrence for layer in spec.layers if layer.mixer.recurrence), None)
    if isinstance(recurrent, GatedDeltaNet):
        weights = convert_recurrent(weights, recurrent, grouped=variant == "grouped")
    latent = None if spec.layers[0].mixer.attention is None else spec.layers[0].mixer.attention.latent
    if latent is not None and variant != "whole":
        weights = split_expansions(weights, latent)
    mlp = spec.layers[-1].mlp
    if isinstance(mlp, MoeMlp):
        stack_experts(weights, spec, mlp.experts, joined=variant == "joined")
    return weights


def describe_heads(writer: gguf.GGUFWriter, heads: int, latent: Latent) -> None:
    """Describe latent attention as one of many heads, which have keys and values of their own."""
    values, prefix = writer.kv_data[0], "deepseek2.attention."
    for name, size in (("head_count_kv", heads), ("key_length", latent.query), ("value_length", latent.value)):
        values[prefix + name] = GGUFValue(size, gguf.GGUFValueType.UINT32)
    for name in ("key_length_mla", "value_length_mla"):
        del values[prefix + name]


def split_expansions(weights: dict[str, torch.Tensor], latent: Latent) -> dict[str, torch.Tensor]:
    """Return tensors with those that make keys and values of latents apart, each head's for keys transposed."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if "kv_b_proj" in name:
            heads = value.view(-1, latent.nope + latent.value, latent.rank)
            keys, values = heads.split([latent.nope, latent.value], 1)
            found |= {
                name.replace("kv_b", "k_b"): keys.mT.contiguous(),
                name.replace("kv_b", "v_b"): values.contiguous(),
            }
        else:
            found[name] = value
    return found


def split_shared_mlp(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a Granite 4's tensors as a Granite 3 has them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = value.chunk(2)
            block = name.removesuffix("shared_mlp.input_linear.weight")
            found |= {f"{block}mlp.gate_proj.weight": gate, f"{block}mlp.up_proj.weight": up}
        else:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = value
    return found


def stack_experts(weights: dict[str, torch.Tensor], spec: ModelSpec, count: int, *, joined: bool) -> None:
    """Put the matrices of all experts of a layer into one tensor; joined: gates and ups together."""
    place, parts = EXPERT_PARTS.get(spec.architecture, ("mlp", ("gate_proj", "up_proj", "down_proj")))
    for layer in range(spec.num_layers):
        if not isinstance(spec.layers[layer].mlp, MoeMlp):
            continue
        prefix = f"model.layers.{layer}.{place}.experts"
        for part in parts:
            stacked = [weights.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(count)]
            weights[f"{prefix}.{part}.weight"] = torch.stack(stacked)
        if joined:
            gates_and_ups = [weights.pop(f"{prefix}.{part}.weight") for part in parts[:2]]
            weights[f"{prefix}.gate_up_proj.weight"] = torch.cat(gates_and_ups, 1)


def convert_recurrent(
    weights: dict[str, torch.Tensor], mixer: GatedDeltaNet, *, grouped: bool
) -> dict[str, torch.Tensor]:
    """Return a model's tensors as llama.cpp's converter names and arranges those of recurrent layers."""
    found: dict[str, torch.Tensor] = {}
    is_next = any("in_proj_qkvz" in name for name in weights)
    for name, value in weights.items():
        if name.endswith(".A_log"):
            value = -torch.exp(value)
        elif "conv1d" in name:
            value = value.squeeze(1)
        if "in_proj_qkvz" in name and not grouped:
            values = mixer.v_heads // mixer.k_heads * mixer.v_dim
            parts = value.view(mixer.k_heads, -1, value.shape[1]).split([mixer.k_dim, mixer.k_dim, values, values], 1)
            *qkv, z = (part.reshape(-1, value.shape[1]) for part in parts)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(qkv), z
            continue
        if "linear_attn." in name and not is_next:
            value = tile_heads(name, value, mixer)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = value
    return found


def tile_heads(name: str, value: torch.Tensor, mixer: GatedDeltaNet) -> torch.Tensor:
    """Put the first value head of each key head before all second ones, in the rows or columns of a tensor."""
    shape = mixer.k_heads, mixer.v_heads // mixer.k_heads
    if "out_proj" in name:
        return value.unflatten(1, (*shape, mixer.v_dim)).transpose(1, 2).flatten(1)
    if "in_proj_qkv" in name or "conv1d" in name:
        keys, values = value.split([2 * mixer.k_heads * mixer.k_dim, mixer.out_size])
        return torch.cat((keys, values.unflatten(0, (*shape, -1)).transpose(0, 1).flatten(0, 2)))
    if ".norm." in name:
        return value
    return value.unflatten(0, (*shape, -1)).transpose(0, 1).flatten(0, 2)


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
    if spec.architecture == "olmo3":
        writer.add_sliding_window_pattern([bool(attention_of(layer).window) for layer in spec.layers])
    if attention.query_growth is not None:
        writer.add_attn_temperature_scale(attention.query_growth.slope)
        writer.add_rope_scaling_yarn_log_mul(1.0)
    if spec.architecture.startswith("granite"):
        writer.add_rope_scaling_finetuned(any(rope.frequencies()))
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
        if attention.latent is not None:  # a tenth of mscale_all_dim
            writer.add_rope_scaling_yarn_log_mul(0.1)
    if isinstance(rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.scaling.factor)
