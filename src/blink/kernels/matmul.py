# SPDX-License-Identifier: Apache-2.0
"""Matmul: a kernel that multiplies with a weight. It says itself what it takes; runner/planner.py chooses.

Only weights of the layouts that runner/ lists it for are given to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blink.formats.layouts import Matrix


def _say_nothing(matrix: Matrix, rows: int) -> str:  # noqa: ARG001 - as others have it
    return ""


def take_all(matrix: Matrix, rows: int) -> None:
    """Refuse nothing."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """x @ weight.T + bias; x: contiguous [rows, in], weight: [out, in]."""

    name: str
    refuses: Callable[[Matrix, int], str | None]  # says why it does not take a weight and so many rows; None: it does
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor]
    describe: Callable[[Matrix, int], str] = _say_nothing  # its tiles, in words


@dataclass(frozen=True, slots=True)
class GatedMatmul:
    """silu(gate) * up of x @ gate_up.T, whose first half are the gates, in one kernel."""

    name: str
    refuses: Callable[[Matrix, int], str | None]
    multiply: Callable[[Tensor, Any], Tensor]
    describe: Callable[[Matrix, int], str] = _say_nothing


def add_bias(result: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias in place, if there is one."""
    return result if bias is None else result.add_(bias)
