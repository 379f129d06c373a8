# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts MLP: route each token to its best experts and sum their weighted results."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.cpu.silu_mul import silu_mul_reference


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_tokens: Tensor | None = None,
    *,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    """Return the sum over each token's top_k experts of probability * expert(x).

    x: [tokens, hidden]; router_logits: [tokens, experts]; gate_up: [experts, 2 * size, hidden], gate first;
    down: [experts, hidden, size]; num_tokens: int32 [1], how many tokens are not padding; the GPU needs it and treats
    no others. Probabilities are a float32 softmax over all experts; `renormalize` makes the chosen ones sum to 1.
    """
    assert router_logits.shape == (x.shape[0], gate_up.shape[0])
    assert gate_up.shape[2] == down.shape[1] == x.shape[1]
    assert gate_up.shape[1] == 2 * down.shape[2]
    assert 0 < top_k <= gate_up.shape[0]
    if x.is_cuda:
        from blink.kernels.gpu.moe import moe_gpu

        assert num_tokens is not None
        return moe_gpu(x, router_logits, gate_up, down, num_tokens, top_k=top_k, renormalize=renormalize)
    return moe_reference(x, router_logits, gate_up, down, top_k=top_k, renormalize=renormalize)


def moe_reference(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, *, top_k: int, renormalize: bool
) -> Tensor:
    """Compute moe with plain PyTorch, one expert after the other."""
    weights, experts = route_reference(router_logits, top_k=top_k, renormalize=renormalize)
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        found = functional.linear(silu_mul_reference(functional.linear(x[tokens], gate_up[expert])), down[expert])
        result.index_add_(0, tokens, found * weights[tokens, choices, None].to(x.dtype))
    return result


def route_reference(router_logits: Tensor, *, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the float32 weights and the experts of each token, both [tokens, top_k]."""
    weights, experts = router_logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
