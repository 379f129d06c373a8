# SPDX-License-Identifier: Apache-2.0
"""Inverts the systems of chunks: recurrent/invert.cu for bf16 on Hopper, torch for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.launch import compile_kernel, launch

_SIZE, _MATRICES = 64, 2


def invert(below: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverses of I + below [..., 64, 64] times factor [..., 64] of each column; below: strictly lower."""
    if dtype != torch.bfloat16 or not below.is_cuda:
        identity = torch.eye(_SIZE, device=below.device).expand_as(below)
        inverse = torch.linalg.solve_triangular(below, identity, upper=False, unitriangular=True)
        return (inverse * factor[..., None, :]).to(dtype).contiguous()
    out = torch.empty_like(below, dtype=dtype)
    matrices = below.numel() // _SIZE**2
    arguments = args("InvertArgs", below=below, factor=factor, out=out, matrices=matrices)
    threads = _MATRICES * _SIZE
    kernel = compile_kernel(f"blink::invert<{threads}>", "recurrent/invert.cu")
    launch(kernel, (-(-matrices // _MATRICES), 1), threads, arguments)
    return out
