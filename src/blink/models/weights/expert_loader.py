# SPDX-License-Identifier: Apache-2.0
"""Read the experts of one layer: matrices of each expert, or of gpt-oss one tensor of all."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.experts import ExpertWeights, QuantizedExperts
from blink.kernels.linear import pack_weight
from blink.models.families.base import ExpertNames
from blink.models.layer_weights import MoeWeights
from blink.models.mlps import MoeMlp
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.packed_loader import load_all_experts, load_quantized_experts
from blink.models.weights.target import WeightTarget


def load_experts(
    checkpoint: Checkpoint, mlp: MoeMlp, prefix: str, hidden: int, names: ExpertNames, target: WeightTarget
) -> MoeWeights:
    """Read the router and the experts below a prefix; hidden: the model's size, names: what it calls experts.

    Raises:
        ConfigError: one is missing, of another shape, or there is no memory.
    """
    if names.are_joined:
        return _load_joined(checkpoint, mlp, prefix, hidden, target)
    name = f"{prefix}.{names.router}.weight"
    checkpoint.check(name, (mlp.experts, hidden))
    gate_up, down = _load_each(checkpoint, mlp, f"{prefix}.experts", hidden, names, target)
    router = target.allocate(mlp.experts, hidden, dtype=None if mlp.router.is_plain else torch.float32)
    target.fill(checkpoint, name, router)
    bias = _load_choice_bias(checkpoint, mlp, prefix, names, target) if mlp.router.has_bias else None
    return MoeWeights(mlp, pack_weight(router), gate_up, down, choice_bias=bias)


def _load_choice_bias(
    checkpoint: Checkpoint, mlp: MoeMlp, prefix: str, names: ExpertNames, target: WeightTarget
) -> Tensor:
    """Read what is added to experts' scores for the choice alone."""
    name = f"{prefix}.{names.choice_bias}"
    checkpoint.check(name, (1, mlp.experts) if names.is_choice_bias_row else (mlp.experts,))
    bias = target.allocate(mlp.experts, dtype=torch.float32)
    target.fill(checkpoint, name, bias)
    return bias


def _load_each(
    checkpoint: Checkpoint, mlp: MoeMlp, prefix: str, hidden: int, names: ExpertNames, target: WeightTarget
) -> tuple[ExpertWeights, ExpertWeights]:
    """Read gate-up and down matrices, of which each expert has tensors of its own."""
    size = mlp.size
    gate, up, down = (f"{prefix}.{{}}.{name}.weight" for name in names.projections)
    for expert in range(mlp.own_experts):
        checkpoint.check(gate.format(expert), (size, hidden))
        checkpoint.check(up.format(expert), (size, hidden))
        checkpoint.check(down.format(expert), (hidden, size))
    return (
        _read_experts(checkpoint, mlp.own_experts, {gate: size, up: size}, hidden, target),
        _read_experts(checkpoint, mlp.own_experts, {down: hidden}, size, target),
    )


def _read_experts(
    checkpoint: Checkpoint, count: int, parts: dict[str, int], columns: int, target: WeightTarget
) -> ExpertWeights:
    """Read matrices of the given numbers of rows of each expert, one below the other; names as format strings."""
    names = [[name.format(expert) for name in parts] for expert in range(count)]
    packed = load_quantized_experts(checkpoint, names, (next(iter(parts.values())), columns), target)
    if packed is not None:
        return packed
    if (stacked := target.read_experts(checkpoint, names, sum(parts.values()), columns)) is not None:
        return stacked
    quantized = [weight for own in names if (weight := target.read_quantized(checkpoint, *own)) is not None]
    if quantized:  # all: experts share a tensor
        return QuantizedExperts(tuple(quantized))
    weights = target.allocate(count, sum(parts.values()), columns)
    for own, weight in zip(names, weights, strict=True):
        for name, part in zip(own, weight.split(list(parts.values())), strict=True):
            target.fill(checkpoint, name, part)
    return weights


def _load_joined(checkpoint: Checkpoint, mlp: MoeMlp, prefix: str, hidden: int, target: WeightTarget) -> MoeWeights:
    """Read experts of one tensor: matrices transposed, gate and up in alternating columns."""
    count, size = mlp.own_experts, mlp.size
    shapes = {
        "router.weight": (mlp.experts, hidden),
        "router.bias": (mlp.experts,),
        "experts.gate_up_proj": (count, hidden, 2 * size),
        "experts.gate_up_proj_bias": (count, 2 * size),
        "experts.down_proj": (count, size, hidden),
        "experts.down_proj_bias": (count, hidden),
    }
    for name, shape in shapes.items():
        checkpoint.check(f"{prefix}.{name}", shape)
    router, router_bias = target.allocate(mlp.experts, hidden), target.allocate(mlp.experts)
    gate_up_bias, down_bias = target.allocate(count, 2 * size), target.allocate(count, hidden)
    target.fill(checkpoint, f"{prefix}.router.weight", router)
    target.fill(checkpoint, f"{prefix}.router.bias", router_bias)
    # Through views in the checkpoint's order of elements.
    target.fill(checkpoint, f"{prefix}.experts.gate_up_proj_bias", gate_up_bias.unflatten(1, (2, size)).transpose(1, 2))
    target.fill(checkpoint, f"{prefix}.experts.down_proj_bias", down_bias)
    name, order = f"{prefix}.experts.gate_up_proj", torch.arange(2 * size).view(size, 2).T.flatten()
    gate_up = load_all_experts(checkpoint, name, (count, 2 * size, hidden), target, order.to(target.device))
    if gate_up is None:
        gate_up = target.allocate(count, 2 * size, hidden)
        target.fill(checkpoint, name, gate_up.unflatten(1, (2, size)).permute(0, 3, 2, 1))
    name = f"{prefix}.experts.down_proj"
    down = load_all_experts(checkpoint, name, (count, hidden, size), target)
    if down is None:
        down = target.allocate(count, hidden, size)
        target.fill(checkpoint, name, down.transpose(1, 2))
    return MoeWeights(mlp, pack_weight(router), gate_up, down, router_bias, (gate_up_bias, down_bias))
