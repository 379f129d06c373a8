# SPDX-License-Identifier: Apache-2.0
"""The modules of benchmarks/kernels/delta_rule, and random inputs of its kernels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"


def load(name: str) -> ModuleType:
    """Return delta_rule/NAME.py as a module."""
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    return importlib.import_module(f"delta_rule.{name}")


reference = load("reference")


def draw_parameters(
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, *, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """Return random weights, whose decays let a state live for some tokens to some hundreds of them."""
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return reference.Parameters(
        (torch.randn(4, channels, device=device) * 0.5).to(dtype),
        -torch.exp(torch.rand(v_heads, device=device) * 2 - 1),
        torch.rand(v_heads, device=device) * 4 - 5,
        torch.rand(v_dim, device=device) + 0.5,
        1e-6,
        k_heads,
        k_dim,
    )


def draw_projections(tokens: int, parameters: Any, *, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return random projections, as parts of one matrix, as one product would leave them."""
    channels, v_heads, v_dim = parameters.conv.shape[1], parameters.rate.shape[0], parameters.norm.shape[0]
    widths = (channels, v_heads * v_dim, v_heads, v_heads)
    whole = torch.randn(tokens, sum(widths), device=device).to(dtype)
    return reference.Projections(*whole.split(widths, 1))


def make_cache(slots: int, parameters: Any, *, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return slots full of NaN."""
    v_heads, v_dim = parameters.rate.shape[0], parameters.norm.shape[0]
    states = torch.full((slots, v_heads, parameters.k_dim, v_dim), torch.nan, device=device)
    inputs = torch.full((slots, 4, parameters.conv.shape[1]), torch.nan, device=device, dtype=dtype)
    return reference.Cache(states, inputs)


def make_rows(slots: list[int], positions: list[int], counts: list[int], device: Any = "cpu") -> Any:
    """Return rows of so many tokens each."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return reference.Rows(*(torch.tensor(v, dtype=torch.int32, device=device) for v in (slots, positions, starts)))
