# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings on the CPU."""

from __future__ import annotations

import math

from torch import Tensor

from blink.kernels.cpu.rms_norm import rms_norm


def join_inputs(
    projected: Tensor, table: Tensor, ids: Tensor, weight: Tensor, layers: range, *, scale: float, eps: float
) -> Tensor:
    """Compute join_inputs with PyTorch."""
    size = weight.shape[0]
    columns = slice(layers.start * size, layers.stop * size)
    found = rms_norm(projected[:, columns].mul(scale).unflatten(1, (-1, size)), weight, eps)
    own = table[:, columns].index_select(0, ids).unflatten(1, (-1, size))
    return found.add_(own, alpha=math.sqrt(size)).mul_(math.sqrt(0.5))
