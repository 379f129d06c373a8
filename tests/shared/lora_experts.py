# SPDX-License-Identifier: Apache-2.0
"""Random adapters of experts in PEFT's two forms, and models that they are merged into."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_adapters import PREFIX, write_adapter

LLAMA = ("gate_proj", "up_proj", "down_proj")
GATE_UP, DOWN = "gate_up_proj", "down_proj"
NEWEST, OLD = "0.19.1", "0.18.1"


def find_parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of all experts' matrices by their names, gates and ups before downs."""
    return {name: value for name, value in model.named_parameters() if name.endswith((f".{GATE_UP}", f".{DOWN}"))}


def write_by_expert(folder: Path, model: Any, *, block: str, names: tuple[str, str, str], **options: Any) -> Path:
    """Write an adapter of each expert's three matrices, whose names they are, but for one expert in five."""
    targets: dict[str, Tensor] = dict(options.pop("dense", {}))
    for name, value in find_parameters(model).items():
        layer = name.split(".mlp.")[0]
        for expert, matrix in enumerate(value):
            if expert % 5 == 4:
                continue
            own = f"{layer}.{block}.experts.{expert}"
            if name.endswith(DOWN):
                targets[f"{own}.{names[2]}"] = matrix
            else:
                targets |= dict(zip((f"{own}.{part}" for part in names[:2]), matrix.chunk(2), strict=True))
    return write_adapter(folder, targets, **options)


def write_fused(
    folder: Path, model: Any, *, seed: int, rank: int = 4, only: str = "", version: str = NEWEST, **config: Any
) -> Path:
    """Write an adapter of the parameters of all experts as that version of PEFT does; only: of one of the two."""
    draw, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    columns = next(
        (bool(module.is_transposed) for module in model.modules() if hasattr(module, "is_transposed")), False
    )
    straight = version == NEWEST or columns
    for name, value in find_parameters(model).items():
        block, own = name.rsplit(".", 1)
        if only and own != only:
            continue
        layer = f"{PREFIX}{block}" + (".base_layer" if own == GATE_UP and not only else "")
        count, out, size = value.shape if not columns else value.mT.shape
        ends = (size, out) if straight else (out, size)
        found[f"{layer}.lora_A.weight"] = torch.randn(rank * count, ends[0], generator=draw) * 0.15
        found[f"{layer}.lora_B.weight"] = torch.randn(ends[1], rank * count, generator=draw) * 0.15
    parameters = [f"mlp.experts.{own}" for own in (GATE_UP, DOWN) if only in ("", own)]
    values: dict[str, Any] = {
        "target_modules": None,
        "target_parameters": parameters,
        "peft_version": version,
        **config,
    }
    return write_adapter(folder, {}, seed=seed, rank=rank, tensors=found, **values)


def merge_experts(model: Any, adapter: Path) -> None:
    """Add an adapter of either form to a model's own weights, and what it has of other modules."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors, parameters = load_file(adapter / "adapter_model.safetensors"), find_parameters(model)
    with torch.no_grad():
        for name, down, up in _list_pairs(tensors):
            if name.endswith((".experts", ".base_layer")):
                _merge_fused(config, parameters, name, down, up * scale)
            elif ".experts." in name:
                _merge_expert(parameters, name, up @ down * scale)
            else:
                model.get_submodule(name).weight += up @ down * scale


def _list_pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            yield module.removeprefix(PREFIX), tensors[name], tensors[f"{module}.lora_B.weight"]


def _merge_expert(parameters: Mapping[str, Tensor], name: str, change: Tensor) -> None:
    layer, _, rest = name.partition(".experts.")
    expert, own = rest.split(".")
    layer = layer.replace("block_sparse_moe", "mlp")
    if own in ("w2", DOWN):
        parameters[f"{layer}.experts.{DOWN}"][int(expert)] += change
    else:
        parameters[f"{layer}.experts.{GATE_UP}"][int(expert)].chunk(2)[own in ("w3", "up_proj")].add_(change)


def _merge_fused(config: Any, parameters: Mapping[str, Tensor], name: str, down: Tensor, up: Tensor) -> None:
    """Do what lora.ParamWrapper.get_delta_weight() of PEFT 0.19.1 does, or of 0.18.1: by its own formulas."""
    parts = [part.rsplit(".", 1)[1] for part in config["target_parameters"]]
    own = GATE_UP if name.endswith(".base_layer") or parts == [GATE_UP] else DOWN
    value = parameters[f"{name.removesuffix('.base_layer')}.{own}"]
    by_expert, by_rank = down.reshape(len(value), -1, down.shape[1]), up.reshape(len(up), -1, len(value))
    form = "e i o" if config["peft_version"] == OLD or value.shape[1] == down.shape[1] != value.shape[2] else "e o i"
    value += torch.einsum(f"o r e, e r i -> {form}", by_rank, by_expert)
