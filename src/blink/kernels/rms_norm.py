# SPDX-License-Identifier: Apache-2.0
"""Root mean square normalisation, with the residual addition that precedes it in a decoder layer."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x; with `residual`, add x to it in place and normalise the sum.

    x, residual: [..., size]; weight: [size]. The mean is taken in float32.
    """
    assert weight.shape == x.shape[-1:]
    assert residual is None or residual.shape == x.shape
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm with plain PyTorch."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight, eps)
