# SPDX-License-Identifier: Apache-2.0
"""Root mean square normalisation, with the residual addition that precedes it in a decoder layer."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.region.native import lib


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x; with `residual`, add x to it in place and normalise the sum.

    x, residual: [..., size]; weight: [size]. The mean is taken in float32.
    """
    assert weight.shape == x.shape[-1:]
    assert residual is None or residual.shape == x.shape
    if x.is_cuda:
        from blink.kernels.gpu.rms_norm import rms_norm_gpu

        return rms_norm_gpu(x, weight, eps, residual)
    if x.dtype == torch.float32 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        return rms_norm_native(x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_native(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm of contiguous float32 on the CPU in one pass."""
    result = torch.empty_like(x)
    size = x.shape[-1]
    added = None if residual is None else residual.data_ptr()
    lib.blink_rms_norm(result.data_ptr(), x.data_ptr(), added, weight.data_ptr(), x.numel() // size, size, eps)
    return result


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm with plain PyTorch."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight, eps)


def last_token_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Return the norm of x + residual [tokens, size] at each row's last token, [num_rows, size]; residual is kept.

    Row r ends before token query_starts[r + 1].
    """
    assert weight.shape == x.shape[-1:]
    assert residual.shape == x.shape
    assert query_starts.shape[0] > num_rows
    if x.is_cuda:
        from blink.kernels.gpu.rms_norm import last_token_norm_gpu

        return last_token_norm_gpu(x, weight, eps, residual, query_starts, num_rows)
    return last_token_norm_reference(x, weight, eps, residual, query_starts, num_rows)


def last_token_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Compute last_token_norm with plain PyTorch."""
    last = query_starts[1 : num_rows + 1] - 1
    return rms_norm(x.index_select(0, last), weight, eps, residual.index_select(0, last))
