# SPDX-License-Identifier: Apache-2.0
"""The small gpt-oss with its experts in MXFP4, as OpenAI publishes its models, and the same dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GROUP = 32
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_JOINED = ("experts.gate_up_proj", "experts.down_proj")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [experts, out, groups, 16] and scales [experts, out, groups] of matrices [experts, in, out]."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scaled = groups / exponents[..., None].exp2()
    codes = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_model(model: Any, path: Path) -> None:
    """Round a model's experts to MXFP4, in place, and those of its directory, which becomes one file."""
    rounded: dict[str, Tensor] = {}
    tensors = {name: value for shard in path.glob("*.safetensors") for name, value in load_file(shard).items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    for name in [name for name in tensors if name.endswith(_JOINED)]:
        blocks, scales = quantize(tensors.pop(name).float())
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rounded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in rounded:
                parameter.copy_(rounded[name])
