# SPDX-License-Identifier: Apache-2.0
"""Root mean square normalisation, with the residual addition that precedes it in a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from blink.kernels.cpu import rms_norm as cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x; with `residual`, add x to it in place and normalise the sum.

    x, residual: [..., size]; weight: [size], of x's type or float32. The mean is taken in float32.
    """
    assert weight.shape == x.shape[-1:]
    assert residual is None or residual.shape == x.shape
    return _code_for(x).rms_norm(x, weight, eps, residual)


def add_norm(
    update: Tensor, end_weight: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """Add the norm of an update to the residual [tokens, size] in place, and return the norm of that.

    end_weight, weight: [size], of both norms; scale: [1], which the residual is then multiplied by.
    """
    assert end_weight.shape == weight.shape == update.shape[-1:]
    assert residual.shape == update.shape
    return _code_for(update).add_norm(update, end_weight, residual, weight, eps, scale)


def last_token_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Return the norm of x + residual [tokens, size] at each row's last token, [num_rows, size]; residual is kept.

    Row r ends before token query_starts[r + 1].
    """
    assert weight.shape == x.shape[-1:]
    assert residual.shape == x.shape
    assert query_starts.shape[0] > num_rows
    return _code_for(x).last_token_norm(x, weight, eps, residual, query_starts, num_rows)


def _code_for(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return cpu
    from blink.kernels.gpu import rms_norm as gpu

    return gpu


def rms_norm_columns(
    x: Tensor, columns: slice, weight: Tensor, eps: float, merge_means: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Normalise some columns of x [rows, width] together, in place; weight: of the columns.

    merge_means: gives the mean of equal parts, of which these columns are one, from this one's; None: they are all.
    For models that are not common: plain PyTorch on every device, and kernels alone, for a graph to hold.
    """
    part = x[:, columns]
    wide = part.float()
    means = wide.square().mean(-1, keepdim=True)
    rate = torch.rsqrt((merge_means(means) if merge_means else means) + eps)
    torch.mul(wide * rate, weight, out=part)
