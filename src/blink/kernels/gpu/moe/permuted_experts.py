# SPDX-License-Identifier: Apache-2.0
"""The experts of up to 256 rows, by grouped_gemm.py's GEMMs of rows that are copied to those who treat them."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.experts import ExpertWeights, find_encoding
from blink.formats.schemes import FP8_ROW
from blink.kernels.gpu.moe import grouped_gemm
from blink.kernels.gpu.moe.grouped import combine_weighted
from blink.kernels.gpu.moe.permutation import permute

Experts = tuple[ExpertWeights, ExpertWeights]  # gate_up and down of blink.kernels.moe


def moe(
    x: Tensor,
    router_logits: Tensor,
    experts: Experts,
    num_tokens: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute moe of contiguous tensors; num_tokens: int32 [1] on the device; rows beyond it become zero."""
    found, own = multiply_permuted(router_logits, x, None, num_tokens, experts, top_k)
    result = torch.empty_like(x)
    combine_weighted(found, own, weights, num_tokens, result, renormalize=renormalize)
    return result


def multiply_permuted(
    logits: Tensor, x: Tensor, inverse_rms: Tensor | None, num_tokens: Tensor, experts: Experts, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return each pair's result [rows * top_k, hidden] and its expert's probability.

    x: [rows, hidden], to be multiplied by inverse_rms if there is one; experts: that grouped_gemm takes.
    """
    gate_up, down = experts
    permuted, routes = permute(logits, x, inverse_rms, num_tokens, top_k, hi_lo=find_encoding(down) == FP8_ROW)
    inner = grouped_gemm.gate(permuted, gate_up, routes)
    found = logits.new_empty(len(routes.weights), down.shape[1])
    grouped_gemm.multiply(inner, down, routes, found)
    return found, routes.weights
