# SPDX-License-Identifier: Apache-2.0
"""Products of up to 8 rows with a weight, with what stands before and behind them in a decoder layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from blink.kernels.gpu.decode.launch import compile_kernel, has_clusters, launch

MAX_ROWS = 8
_STEP = 32  # k of one row that a load takes at least
_WARP_WEIGHTS = 8192  # that a warp's registers hold
_MAX_WARPS = 7
_MAX_CLUSTER = 8
_FEW_WARPS = 5  # of which several blocks fit a multiprocessor
_SHARED_BYTES = 100 << 10  # of which two blocks fit


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
        ("fetched", ctypes.c_int),
    ]


@dataclass(frozen=True, slots=True)
class Split:
    """How a product is split among warps; see csrc/gpu/decode/gemv.cuh."""

    warps: int
    cluster: int
    slices: int  # of 32 k, that one load of a warp takes of the same weight row
    tile: int  # weight rows of a block
    ahead: int = 0
    fetched: int = 0


def choose_split(rows: int, k: int, n: int) -> Split | None:  # noqa: ARG001 - n is for benchmarks' own choices
    """Return a split with which all weights of a lane fit its registers; None if there is none."""
    slices, tile = (8, 8) if rows == 1 else (4, 8) if rows == 2 else (2, 16)
    splits = [_split(k, tile, count) for count in (8, 4, 2) if count <= slices]
    best = min(splits, key=lambda split: split.warps * split.cluster * _slice(k, split))  # the least beyond k's end
    fits = best.warps <= _MAX_WARPS and _shared_bytes(rows, k, best, has_norm=True) <= _SHARED_BYTES
    return best if fits else None


def _split(k: int, tile: int, slices: int) -> Split:
    span = _STEP * slices
    warps = _ceil(_ceil(k, span), _WARP_WEIGHTS // tile // span)
    cluster = 1
    while cluster < _MAX_CLUSTER and has_clusters() and warps > _FEW_WARPS * cluster:
        cluster *= 2
    return Split(max(2, _ceil(warps, cluster)), cluster, slices, tile)


def _slice(k: int, split: Split) -> int:
    """Return the k of one warp."""
    span = _STEP * split.slices
    return _ceil(k, span * split.warps * split.cluster) * span


def _shared_bytes(rows: int, k: int, split: Split, *, has_norm: bool) -> int:
    """Return the size of csrc/gpu/decode/gemv.cuh's GemvShared: activations, norm weights, partial sums."""
    width = _slice(k, split)
    staged = split.warps * rows * (width + 32) * 2
    sums = split.warps * split.cluster * rows * (split.tile + 1) * 4
    return _ceil(staged + sums, 16) * 16 + has_norm * split.warps * width * 2


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


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
    n, k = weight.shape
    sizes = rows <= MAX_ROWS and k % 8 == 0 and n >= 32
    return sizes and weight.dtype == torch.bfloat16 and choose_split(rows, k, n) is not None


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
    assert split is not None
    outputs = split.tile // 2 if output is _Output.GATE else split.tile
    norm = "true" if norm_weight is not None else "false"
    sizes = f"{rows}, {k}, {split.warps}, {split.cluster}, {split.slices}, {split.tile}"
    arguments = _Arguments(
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        None if norm_weight is None else norm_weight.data_ptr(),
        out.data_ptr(),
        eps,
        n,
        split.ahead,
        split.fetched,
    )
    launch(
        compile_kernel(f"blink::gemv<{sizes}, {output.value}, {norm}>"),
        (_ceil(n, outputs) * split.cluster, 1),
        32 * split.warps,
        arguments,
        cluster=split.cluster,
        shared_bytes=_shared_bytes(rows, k, split, has_norm=norm_weight is not None),
    )
