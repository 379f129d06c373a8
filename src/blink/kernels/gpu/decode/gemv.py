# SPDX-License-Identifier: Apache-2.0
"""Products of up to 16 rows with a weight, with what stands before and behind them in a decoder layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from blink.kernels.gpu.decode.launch import compile_kernel, has_clusters, launch

MAX_ROWS = 16
_TILE = 8  # csrc/gpu/decode/gemv.cuh's kTile
_STEP = 32  # its kStepK
_MAX_STEPS = 32  # loads of a lane: more of them than registers hold


class _Output(Enum):  # csrc/gpu/decode/gemv.cuh's Output
    STORE = "blink::Output::kStore"
    ADD = "blink::Output::kAdd"
    GATE = "blink::Output::kGate"


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("n", ctypes.c_int),
        ("ahead", ctypes.c_int),
    ]


@dataclass(frozen=True, slots=True)
class Split:
    """How k is split, and how many tiles of weights beyond those in registers are fetched to L2."""

    warps: int
    cluster: int
    ahead: int = 0


def choose_split(rows: int, k: int, n: int) -> Split:  # noqa: ARG001 - benchmarks put others in this one's place
    """Return how the warps and blocks of a cluster share k, so that all of a lane's weights fit its registers."""
    steps = -(-k // _STEP)
    cluster = 1
    while has_clusters() and cluster < 8 and steps > 5 * _MAX_STEPS * cluster:
        cluster *= 2
    warps = max(2, -(-steps // (_MAX_STEPS * cluster)))
    return Split(warps, cluster)


def normed_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return rms_norm(x) @ weight.T + bias."""
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _launch(_Output.STORE, x, weight, out, bias=bias, norm_weight=norm_weight, eps=eps)
    return out


def gated_linear(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of rms_norm(x) @ gate_up.T, whose first half are the gates."""
    out = x.new_empty(x.shape[0], gate_up.shape[0] // 2) if out is None else out
    _launch(_Output.GATE, x, gate_up, out, norm_weight=norm_weight, eps=eps)
    return out


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
    """Add x @ weight.T + bias to residual in place."""
    _launch(_Output.ADD, x, weight, residual, bias=bias)


def can_multiply(rows: int, weight: Tensor) -> bool:
    """Tell whether the kernels take so many rows and this weight [out, in]."""
    return rows <= MAX_ROWS and weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def _launch(
    output: _Output,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    rows, k = x.shape
    n = out.shape[1]
    assert can_multiply(rows, weight)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert weight.shape == (2 * n if output is _Output.GATE else n, k) and out.shape[0] == rows
    assert x.dtype == out.dtype == weight.dtype
    split = choose_split(rows, k, n)
    norm = "true" if norm_weight is not None else "false"
    name = f"blink::gemv<{rows}, {k}, {split.warps}, {split.cluster}, {output.value}, {norm}>"
    arguments = _Arguments(
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        None if norm_weight is None else norm_weight.data_ptr(),
        out.data_ptr(),
        eps,
        n,
        split.ahead,
    )
    tiles = -(-n // (_TILE // 2 if output is _Output.GATE else _TILE))
    launch(compile_kernel(name), (tiles * split.cluster, 1), 32 * split.warps, arguments, cluster=split.cluster)
