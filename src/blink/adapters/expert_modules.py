# SPDX-License-Identifier: Apache-2.0
"""The matrices of experts, by the names that adapters' files call them: those of one expert, and parameters of all."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from blink.adapters.module import Fused, Module, Orientation
from blink.models.families.base import ExpertNames
from blink.models.layer_weights import DenseWeights, MoeWeights

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the parameters of all experts, in transformers from version 5 on


def list_experts(mlp: DenseWeights | MoeWeights, names: ExpertNames | None) -> Iterator[tuple[str, Module]]:
    """Return the modules of a layer's experts by their names in the layer; none where it has no experts."""
    if isinstance(mlp, DenseWeights) or names is None:
        return
    size, hidden = mlp.spec.size, mlp.down.shape[1]
    gate, up, down = names.projections
    blocks = dict.fromkeys((f"{names.block}.experts", "mlp.experts", *(("experts",) if names.are_beside else ())))
    for block in blocks:
        if not names.are_joined:
            for expert in range(mlp.spec.own_experts):
                own = f"{block}.{expert}"
                yield f"{own}.{gate}", Module(mlp.gate_up, slice(0, size), (size, hidden), None, expert)
                yield f"{own}.{up}", Module(mlp.gate_up, slice(size, 2 * size), (size, hidden), None, expert)
                matrix = Module(mlp.down, slice(0, hidden), (hidden, size), None, expert, refusal=_refuse_down(mlp))
                yield f"{own}.{down}", matrix
        yield from _list_fused(block, mlp, names)


def _list_fused(block: str, mlp: MoeWeights, names: ExpertNames) -> Iterator[tuple[str, Module]]:
    size, hidden = mlp.spec.size, mlp.down.shape[1]
    orientation: Orientation = "columns" if names.are_joined else "unknown" if names.fused == "columns" else "rows"
    order = torch.arange(2 * size).view(size, 2).T.flatten() if names.are_joined else None
    rows = slice(0, 2 * size)
    yield f"{block}.{GATE_UP}", Module(mlp.gate_up, rows, (2 * size, hidden), order, fused=Fused(orientation, 2))
    own = Fused(orientation, 1)
    matrix = Module(mlp.down, slice(0, hidden), (hidden, size), None, fused=own, refusal=_refuse_down(mlp))
    yield f"{block}.{DOWN}", matrix


def _refuse_down(mlp: MoeWeights) -> str:
    """Return why adapters may not change the matrices behind the activation; empty: they may."""
    return "" if mlp.beside is None else "this model's factor of each expert is part of the matrix"
