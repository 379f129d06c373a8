# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of each quantization scheme, made as its tools write them, and the same dequantised."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GROUP = 128
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from its lowest bits on
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _mix(scheme: str) -> dict[str, Any]:
    """Return that of layers of 4 bits and an output layer in FP8."""
    layers, head = (SCHEMES[one]["config_groups"]["group_0"] for one in (scheme, "fp8-channel"))
    groups = {
        "group_0": layers | {"format": "pack-quantized"},
        "group_1": head | {"format": "float-quantized", "targets": ["re:.*lm_head$"]},
    }
    return compressed("mixed-precision", {}, None) | {"ignore": [], "config_groups": groups}


_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8-channel": compressed("float-quantized", {**_FP8_WEIGHTS, "strategy": "channel"}, _DYNAMIC),
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "packed": compressed("pack-quantized", _INT4_WEIGHTS, None),
    # Groups that a GPU keeps in a GGUF format's arrays.
    "awq-64": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "gptq-32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "packed-64": compressed("pack-quantized", {**_INT4_WEIGHTS, "group_size": 64}, None),
}
# The output layer is quantized too: how the layers are, and how it is.
_WITH_HEAD = {
    "fp8-head": ("fp8-channel", "fp8-channel"),
    "awq-head": ("awq", "awq"),
    "gptq-head": ("gptq", "gptq"),
    "packed-head": ("packed", "packed"),
    "packed-fp8-head": ("packed", "fp8-channel"),
    "packed-64-fp8-head": ("packed-64", "fp8-channel"),
}
SCHEMES |= {
    "fp8-head": {**SCHEMES["fp8-channel"], "ignore": []},
    "awq-head": SCHEMES["awq"],  # says nothing of it
    "gptq-head": {**SCHEMES["gptq"], "lm_head": True},
    "packed-head": {**SCHEMES["packed"], "ignore": []},
    "packed-fp8-head": _mix("packed"),
    "packed-64-fp8-head": _mix("packed-64"),
}


def write_checkpoints(
    folder: Path, scheme: str, plain_layers: Collection[int] = (), /, **changes: Any
) -> tuple[Path, Path]:
    """Write a random model quantized by a scheme and the same dequantised in float32; return both directories.

    plain_layers: those that stay in 16 bits, as the scheme, one of compressed-tensors, then says.
    """
    generator = torch.Generator().manual_seed(1)
    config = CONFIG | changes
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    of_layers, of_head = _WITH_HEAD.get(scheme, (scheme, ""))
    for name, shape in _list_shapes(config).items():
        chosen = of_head if name == "lm_head" else of_layers
        if any(name.startswith(f"model.layers.{index}.") for index in plain_layers):
            chosen = ""
        if len(shape) == 1 or "embed" in name or not chosen or name.endswith("mlp.gate"):
            scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            values = torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
            stored[f"{name}.weight"] = plain[f"{name}.weight"] = values.to(torch.bfloat16).float()
        else:
            parts, plain[f"{name}.weight"] = _quantize(chosen, shape, generator)
            stored.update({f"{name}.{ending}": value.contiguous() for ending, value in parts.items()})
    quantization = dict(SCHEMES[scheme])
    if plain_layers:
        quantization["ignore"] = quantization["ignore"] + [rf"re:.*layers\.{index}\..*" for index in plain_layers]
    for place, tensors, extra in (
        (folder / scheme, stored, {"quantization_config": quantization}),
        (folder / "plain", plain, {}),
    ):
        place.mkdir(parents=True)
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | extra))
    return folder / scheme, folder / "plain"


def _list_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, size, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    places, inner = ["mlp"], size
    if experts := config.get("num_experts"):
        layer["mlp.gate"] = (experts, hidden)
        places, inner = [f"mlp.experts.{expert}" for expert in range(experts)], config["moe_intermediate_size"]
    for place in places:
        layer |= {f"{place}.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        layer[f"{place}.down_proj"] = (hidden, inner)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _quantize(scheme: str, shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random matrix' tensors by the ends of their names, and the matrix."""
    rows, columns = shape
    if scheme.startswith("fp8"):
        return _quantize_fp8(scheme, rows, columns, generator)
    scheme, _, size = scheme.partition("-")
    group = int(size or GROUP)
    groups = columns // group
    codes = torch.randint(0, 16, shape, generator=generator)
    zeros = torch.randint(5, 11, (rows, groups), generator=generator)
    if scheme == "packed":
        zeros = torch.full((rows, groups), 8)
    scales = ((torch.rand(rows, groups, generator=generator) + 0.5) * columns**-0.5 / 4).to(torch.float16)
    plain = (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    if scheme == "packed":
        sizes = torch.tensor(shape)
        return {"weight_packed": _pack(codes), "weight_scale": scales, "weight_shape": sizes}, plain
    if scheme == "awq":
        parts = {"qweight": _pack(codes.T, _AWQ_COLUMNS), "qzeros": _pack(zeros.T, _AWQ_COLUMNS)}
        return parts | {"scales": scales.T}, plain
    parts = {"qweight": _pack(codes).T, "qzeros": _pack(zeros.T - 1), "g_idx": torch.arange(columns) // group}
    return parts | {"scales": scales.T}, plain


def _quantize_fp8(scheme: str, rows: int, columns: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    sizes = {"fp8-channel": (rows, 1), "fp8-tensor": (1, 1), "fp8-block": (-(-rows // GROUP), -(-columns // GROUP))}
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = (torch.rand(sizes[scheme], generator=generator) + 0.5) * columns**-0.5
    whole = scales
    if scheme == "fp8-block":
        whole = scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    name = "weight_scale_inv" if scheme == "fp8-block" else "weight_scale"
    return {"weight": values, name: scales[0, 0] if scheme == "fp8-tensor" else scales}, values.float() * whole


def _pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight columns of numbers into words; order: which column lies at which four bits."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes[:, column::8] << 4 * place
    return words.to(torch.int32)
