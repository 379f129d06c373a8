# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts MLP on the CPU, one expert after the other."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.formats.experts import ExpertWeights
from blink.kernels.cpu.activation import activate
from blink.kernels.linear import MATMULS
from blink.kernels.operands import Activation


class RowUpdates(Protocol):
    """What is added to rows' results of experts' matrices."""

    def add_expert(self, result: Tensor, x: Tensor, weight: ExpertWeights, expert: int, tokens: Tensor) -> Tensor:
        """Add to result [rows, out], in place, what belongs to x [rows, in] times an expert's matrix; return it.

        tokens: int64 [rows], the token in the step that each row belongs to.
        """
        ...


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    top_k: int,
    renormalize: bool,
    activation: Activation = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
    weights: Tensor | None = None,
    first: int = 0,
    updates: RowUpdates | None = None,
) -> Tensor:
    """Compute moe with PyTorch."""
    found, experts = route(router_logits, top_k=top_k, renormalize=renormalize)
    weights = found if weights is None else weights
    result = torch.zeros_like(x)
    for chosen in experts.unique().tolist():
        expert = chosen - first
        if not 0 <= expert < gate_up.shape[0]:
            continue
        tokens, choices = (experts == chosen).nonzero(as_tuple=True)
        inner_bias, bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
        matrices = (gate_up[expert], down[expert])  # pyright: ignore[reportIndexIssue] - GgufExperts are a GPU's
        rows = x[tokens]
        inner = _multiply(rows, matrices[0], inner_bias)
        if updates is not None:
            updates.add_expert(inner, rows, gate_up, expert, tokens)
        inner = activate(inner, activation)
        found = _multiply(inner, matrices[1], bias)
        if updates is not None:
            updates.add_expert(found, inner, down, expert, tokens)
        result.index_add_(0, tokens, found * weights[tokens, choices, None].to(x.dtype))
    return result


def _multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    [matmul] = MATMULS[matrix_of(weight).layout]
    return matmul.multiply(x, weight, bias)


def route(router_logits: Tensor, *, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the float32 weights and the experts of each token, both [tokens, top_k]."""
    weights, experts = router_logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
