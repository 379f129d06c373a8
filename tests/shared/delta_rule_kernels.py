# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the delta-rule kernels."""

from __future__ import annotations

from typing import Any

import torch

from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import Rows


def draw_weights(
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, *, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> DeltaWeights:
    """Return random weights, whose decays let a state live for some tokens to some hundreds of them."""
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return DeltaWeights(
        (torch.randn(4, channels, device=device) * 0.5).to(dtype),
        -torch.exp(torch.rand(v_heads, device=device) * 2 - 1),
        torch.rand(v_heads, device=device) * 4 - 5,
        torch.rand(v_dim, device=device) + 0.5,
        1e-6,
        k_heads,
        k_dim,
    )


def draw_projections(
    tokens: int, weights: DeltaWeights, *, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> Projections:
    """Return random projections, as parts of one matrix, as one product would leave them."""
    channels, v_heads, v_dim = weights.conv.shape[1], weights.rate.shape[0], weights.norm.shape[0]
    widths = (channels, v_heads * v_dim, v_heads, v_heads)
    whole = torch.randn(tokens, sum(widths), device=device).to(dtype)
    return Projections(*whole.split(widths, 1))


def make_cache(
    slots: int, weights: DeltaWeights, *, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> StateCache:
    """Return slots full of NaN."""
    v_heads, v_dim = weights.rate.shape[0], weights.norm.shape[0]
    states = torch.full((slots, v_heads, weights.k_dim, v_dim), torch.nan, device=device)
    inputs = torch.full((slots, *weights.conv.shape), torch.nan, device=device, dtype=dtype)
    return StateCache(states, inputs)


def make_rows(slots: list[int], positions: list[int], counts: list[int], device: Any = "cpu") -> Rows:
    """Return rows of so many tokens each."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return Rows(*(torch.tensor(v, dtype=torch.int32, device=device) for v in (slots, positions, starts)))
