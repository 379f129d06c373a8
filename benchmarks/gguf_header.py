# SPDX-License-Identifier: Apache-2.0
"""Write the header of a GGUF file for a config.json, with Q4_K_M's or one type for all matrices.

The file has its whole size and takes no room: its tensors are holes. `--load-format dummy` fills weights of such a file
with random numbers in its types, so that a GPU can be measured without the file itself.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from blink.models.families import FAMILIES
from blink.models.latent import Latent
from blink.models.layers import CONV_WIDTH
from blink.models.mlps import MoeMlp
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import GgufCheckpoint
from blink.models.weights.decoder_loader import DecoderLoader
from blink.models.weights.source import read_spec
from blink.models.weights.target import WeightTarget

Kind = gguf.GGMLQuantizationType
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
_NUMPY = {Kind.F32: np.dtype(np.float32), Kind.F16: np.dtype(np.float16)}
_ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT


class Names:
    """A checkpoint that has every tensor and notes its shape."""

    norm_shift = 0.0
    keeps_groups = False
    matrices = None
    stored_rows: GgufCheckpoint | None = None

    def __init__(self) -> None:
        """Note nothing yet."""
        self.shapes: dict[str, tuple[int, ...]] = {}  # experts' with their number in front

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Note a tensor."""
        if match := _EXPERT.fullmatch(name):
            self.shapes[match[1] + match[3]] = (int(match[2]) + 1, *shape)
        else:
            self.shapes[name] = tuple(shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Leave it as it is."""

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> None:
        """Fill all."""


def list_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by their names in Hugging Face's files."""
    names = Names()
    DecoderLoader(names, spec, WeightTarget(torch.device("meta"), torch.bfloat16, lambda _: None)).load()
    return names.shapes


def choose_kind(name: str, shape: Sequence[int], layer: int, num_layers: int, kind: Kind | None) -> Kind:
    """Return a tensor's type; kind: of all matrices, or None for what llama.cpp calls Q4_K_M."""
    if len(shape) < 2 or any(part in name for part in ("ffn_gate_inp", "ssm_alpha", "ssm_beta", "ssm_conv1d", "_norm")):
        return Kind.F32
    if kind is None:
        eighth = num_layers // 8
        is_better = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        kind = Kind.Q5_K if "attn_qkv" in name else Kind.Q4_K
        if name == "output.weight" or (is_better and ("attn_v" in name or "ffn_down" in name)):
            kind = Kind.Q6_K
    return Kind.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def add_sizes(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write what most families have, under the names that llama.cpp's converter uses."""
    attention, mlp, last = spec.attentions[0], spec.layers[-1].mlp, spec.layers[-1].mixer.attention
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layers[0].mlp.size)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    if attention.latent is None:
        writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    if last is not None:
        writer.add_rope_freq_base(last.rope.theta)
    writer.add_rope_dimension_count(attention.rope.rotary_dim)
    if mlp.mixture is not None:
        _add_mixture(writer, spec, mlp.mixture)
    if attention.latent is not None:
        _add_latent(writer, attention.latent)
    recurrence = spec.layers[0].mixer.recurrence
    if recurrence is not None and recurrence.delta_net is not None:
        writer.add_ssm_conv_kernel(CONV_WIDTH)
        writer.add_ssm_state_size(recurrence.delta_net.k_dim)
        writer.add_ssm_group_count(recurrence.delta_net.k_heads)
        writer.add_ssm_time_step_rank(recurrence.delta_net.v_heads)
        writer.add_ssm_inner_size(recurrence.delta_net.out_size)
        writer.add_full_attention_interval(4)


def _add_mixture(writer: gguf.GGUFWriter, spec: ModelSpec, mlp: MoeMlp) -> None:
    router, names = mlp.router, FAMILIES[spec.architecture].experts
    writer.add_expert_count(mlp.experts)
    writer.add_expert_used_count(router.top_k)
    writer.add_expert_feed_forward_length(mlp.size)
    if names is None or not names.shared_count:
        if mlp.shared_size:
            writer.add_expert_shared_feed_forward_length(mlp.shared_size)
        return
    writer.add_expert_shared_count(mlp.shared_size // mlp.size)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if router.score == "sigmoid" else kinds.SOFTMAX)
    writer.add_expert_weights_norm(router.renormalize)
    writer.add_expert_weights_scale(router.scale)
    writer.add_expert_group_count(router.groups)
    writer.add_expert_group_used_count(router.top_groups)
    writer.add_leading_dense_block_count(sum(layer.mlp.mixture is None for layer in spec.layers))


def _add_latent(writer: gguf.GGUFWriter, latent: Latent) -> None:
    if latent.query_rank:
        writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.rank)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.query)
    writer.add_value_length_mla(latent.value)


def write_header(spec: ModelSpec, path: Path, kind: Kind | None) -> int:
    """Write a header and make the file as long as its tensors need; return that length."""
    name = FAMILIES[spec.architecture].gguf
    if not name:
        raise SystemExit(f"{spec.architecture} has no architecture in GGUF files")
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, spec.num_layers)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(spec.num_layers)
    add_sizes(writer, spec)
    size = 0
    for own, shape in list_shapes(spec).items():
        stored = names.get_name(own.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
        assert stored is not None, own
        match = re.match(r"blk\.(\d+)\.", stored)
        chosen = choose_kind(stored, shape, int(match[1]) if match else 0, spec.num_layers, kind)
        values, num_bytes = gguf.GGML_QUANT_SIZES[chosen]
        own_size = torch.Size(shape).numel() // values * num_bytes
        byte_shape = (*shape[:-1], shape[-1] // values * num_bytes)
        if chosen in (Kind.F32, Kind.F16):
            writer.add_tensor_info(stored, shape, _NUMPY[chosen], own_size)
        else:
            writer.add_tensor_info(stored, byte_shape, np.dtype(np.uint8), own_size, raw_dtype=chosen)
        size += -(-own_size // _ALIGNMENT) * _ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total = -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT + size
    os.truncate(path, total)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json")
    parser.add_argument("output", type=Path, help=".gguf file to write")
    parser.add_argument("--type", default="Q4_K_M", help="Q4_K_M, or the type of all matrices, as Q8_0")
    options = parser.parse_args()
    kind = None if options.type == "Q4_K_M" else Kind[options.type]
    size = write_header(read_spec(options.model), options.output, kind)
    print(f"{options.output}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
