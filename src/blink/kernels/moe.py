# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts MLP: route each token to its best experts and sum their weighted results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blink.formats.experts import ExpertWeights
from blink.kernels.cpu import moe as cpu
from blink.kernels.operands import Activation


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    num_tokens: Tensor | None = None,
    *,
    top_k: int,
    renormalize: bool,
    activation: Activation = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
    weights: Tensor | None = None,
    first: int = 0,
    updates: Any = None,
) -> Tensor:
    """Return the sum over each token's top_k experts of probability * expert(x).

    x: [tokens, hidden]; router_logits: [tokens, experts]; gate_up: [experts, 2 * size, hidden], gate first;
    down: [experts, hidden, size]; num_tokens: int32 [1], how many tokens are not padding; the GPU needs it and treats
    no others; biases: of gate_up [experts, 2 * size] and of down [experts, hidden]. Probabilities are a float32 softmax
    over all experts; `renormalize` makes the chosen ones sum to 1. weights: float32 [tokens, top_k], what a token's
    results are multiplied by instead, from the expert of its largest logit on. first: which of the router's experts is
    the first here; those that are elsewhere add nothing. updates: what a device adds to
    products with experts' matrices: RowUpdates of cpu/moe.py or RoutedUpdates of gpu/moe/grouped.py; None: nothing.
    """
    assert len(router_logits) == len(x) and first + gate_up.shape[0] <= router_logits.shape[1]
    assert gate_up.shape[2] == down.shape[1] == x.shape[1]
    assert gate_up.shape[1] == 2 * down.shape[2]
    assert 0 < top_k <= router_logits.shape[1]
    assert weights is None or weights.shape == (x.shape[0], top_k)
    options: dict[str, Any] = {
        "top_k": top_k,
        "renormalize": renormalize,
        "activation": activation,
        "biases": biases,
        "weights": weights,
        "first": first,
        "updates": updates,
    }
    if x.is_cuda:
        from blink.kernels.gpu.moe import grouped as gpu

        assert num_tokens is not None
        return gpu.moe(x, router_logits, gate_up, down, num_tokens, **options)
    return cpu.moe(x, router_logits, gate_up, down, **options)
