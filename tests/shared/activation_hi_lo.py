# SPDX-License-Identifier: Apache-2.0
"""Activations in hi/lo FP8 in plain torch: what csrc/kernels/common/hi_lo.cuh says that kernels write."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.schemes import FormatId

DIVISOR = 4.0
FACTORS = (1.0, 16.0)  # of each half
_LARGEST = 57344.0  # of e5m2


def split(x: Tensor, format: FormatId = FormatId.FP8) -> Tensor:
    """Return the hi/lo FP8 of activations [rows, columns]: uint8 [2, rows, columns], in packed weights' order."""
    rest, hi_lo = x.double() / DIVISOR, []
    not_finite = rest - rest
    for i, factor in enumerate(FACTORS):
        half = (rest * factor + (0 if i == 0 else not_finite)).clamp(-_LARGEST, _LARGEST).float().to(torch.float8_e5m2)
        hi_lo.append(_pack(half.view(torch.uint8), format))
        rest = rest - half.double() / factor
    return torch.stack(hi_lo)


def join(hi_lo: Tensor, format: FormatId | None = FormatId.FP8) -> Tensor:
    """Return the activations of hi/lo FP8, float64 [rows, columns]; format: that they lie for; None: in order."""
    parts = [_unpack(hi_lo[i], format).view(torch.float8_e5m2).double() / factor for i, factor in enumerate(FACTORS)]
    return (parts[0] + parts[1]) * DIVISOR


def _pack(values: Tensor, format: FormatId) -> Tensor:
    if format is FormatId.FP8:  # as quantized.cuh says: lane, step, 8 further, the next
        return values.view(len(values), -1, 8, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(values.shape)
    # Of each 32: the odd numbers of words 8 further, lane, the next, the second 16.
    return values.view(len(values), -1, 2, 2, 4, 2).permute(0, 1, 3, 4, 5, 2).reshape(values.shape)


def _unpack(values: Tensor, format: FormatId | None) -> Tensor:
    if format is None:
        return values
    if format is FormatId.FP8:
        return values.view(len(values), -1, 4, 8, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(values.shape)
    return values.view(len(values), -1, 2, 4, 2, 2).permute(0, 1, 5, 2, 3, 4).reshape(values.shape)
