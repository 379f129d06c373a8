# SPDX-License-Identifier: Apache-2.0
"""Planes of activations in plain torch: what csrc/gpu/decode/planes.cuh says that kernels write."""

from __future__ import annotations

import torch
from torch import Tensor

DIVISOR = 4.0
FACTORS = (1.0, 16.0)  # of each plane
_LARGEST = 57344.0  # of e5m2


def split(x: Tensor) -> Tensor:
    """Return the planes of activations [rows, columns]: uint8 [2, rows, columns], in a packed weight's order."""
    rest, planes = x.double() / DIVISOR, []
    not_finite = rest - rest
    for i, factor in enumerate(FACTORS):
        plane = (rest * factor + (0 if i == 0 else not_finite)).clamp(-_LARGEST, _LARGEST).float().to(torch.float8_e5m2)
        planes.append(_pack(plane.view(torch.uint8)))
        rest = rest - plane.double() / factor
    return torch.stack(planes)


def join(planes: Tensor, *, packed: bool = True) -> Tensor:
    """Return the activations of planes, float64 [rows, columns]; packed: their columns lie as those of weights do."""
    parts = [
        (_unpack(planes[i]) if packed else planes[i]).view(torch.float8_e5m2).double() / factor
        for i, factor in enumerate(FACTORS)
    ]
    return (parts[0] + parts[1]) * DIVISOR


def _pack(values: Tensor) -> Tensor:  # as quantized.cuh says: lane, step, 8 further, the next
    return values.view(len(values), -1, 8, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(values.shape)


def _unpack(values: Tensor) -> Tensor:
    return values.view(len(values), -1, 4, 8, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(values.shape)
