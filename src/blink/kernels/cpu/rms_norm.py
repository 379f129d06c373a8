# SPDX-License-Identifier: Apache-2.0
"""Root mean square normalisation on the CPU: natively in one pass where it can, else by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.region.native import lib


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm the fastest way that the operands permit."""
    if x.dtype == torch.float32 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        return rms_norm_native(x, weight, eps, residual)
    return rms_norm_torch(x, weight, eps, residual)


def rms_norm_native(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm of contiguous float32 in one pass."""
    result = torch.empty_like(x)
    size = x.shape[-1]
    added = None if residual is None else residual.data_ptr()
    lib.blink_rms_norm(result.data_ptr(), x.data_ptr(), added, weight.data_ptr(), x.numel() // size, size, eps)
    return result


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm with plain PyTorch."""
    if residual is not None:
        x = residual.add_(x)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_norm(
    update: Tensor, end_weight: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """Compute add_norm as two norms."""
    residual.add_(rms_norm(update, end_weight, eps))
    if scale is not None:
        residual.mul_(scale)
    return rms_norm(residual, weight, eps)


def last_token_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Compute last_token_norm of gathered rows."""
    last = query_starts[1 : num_rows + 1] - 1
    return rms_norm(x.index_select(0, last), weight, eps, residual.index_select(0, last))
