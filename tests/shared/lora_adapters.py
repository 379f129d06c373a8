# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters in PEFT's form, and models that they are merged into."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OTHER_PARTS = re.compile(r"\.experts\.|vision|visual")
OTHER_ENDS = ("qkv_proj", "gate_up_proj", "out_proj", "fc1", "fc2", "input_linear", "output_linear")


def find_targets(model: Any, ends: Sequence[str] = (*ENDS, *OTHER_ENDS)) -> dict[str, Tensor]:
    """Return the weights that an adapter may change, by their modules' names: not those of experts."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in ends and not _OTHER_PARTS.search(name)
    }


def write_adapter(
    folder: Path,
    targets: Mapping[str, Tensor],
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    size: float = 0.15,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of some modules; tensors: in addition, or in the place of those of the same names."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, weight in targets.items():
        out_size, in_size = weight.shape
        found[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, in_size, generator=draw) * size
        found[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(out_size, rank, generator=draw) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**found, **(tensors or {})}, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-1] for name in targets}),
        "bias": "none",
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def merge(model: Any, adapter: Path) -> None:
    """Add an adapter to a model's own weights, as PEFT merges it."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in [name for name in tensors if ".lora_A." in name]:
            change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name] * scale
            modules[name.removeprefix(PREFIX).removesuffix(".lora_A.weight")].weight += change
