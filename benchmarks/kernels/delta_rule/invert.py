# SPDX-License-Identifier: Apache-2.0
"""Inverts the systems of chunks: invert.cu for bf16 on Hopper, torch for the rest."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = str(Path(__file__).with_suffix(".cu"))
_SIZE, _MATRICES = 64, 2


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("below", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("matrices", ctypes.c_int),
    )


def invert(below: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverses of I + below [..., 64, 64] times factor [..., 64] of each column; below: strictly lower."""
    if dtype != torch.bfloat16 or not below.is_cuda:
        identity = torch.eye(_SIZE, device=below.device).expand_as(below)
        inverse = torch.linalg.solve_triangular(below, identity, upper=False, unitriangular=True)
        return (inverse * factor[..., None, :]).to(dtype).contiguous()
    from blink.kernels.gpu.launch import compile_kernel, launch  # needs CUDA

    out = torch.empty_like(below, dtype=dtype)
    matrices = below.numel() // _SIZE**2
    arguments = bytes(_Arguments(below.data_ptr(), factor.data_ptr(), out.data_ptr(), matrices))
    threads = _MATRICES * _SIZE
    launch(compile_kernel(f"blink::invert<{threads}>", _SOURCE), (-(-matrices // _MATRICES), 1), threads, arguments)
    return out
