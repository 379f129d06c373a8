# SPDX-License-Identifier: Apache-2.0
"""Round a matrix so that its GEMMs change least: what rounding a column loses, the later columns make up for.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) on fixed grids. Which order the columns are rounded in does not show in the
result: groups keep their columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blink.formats.fp8 import FP8, FP8_MAX
from blink.formats.matrix import QuantizedMatrix

_BLOCK = 128  # columns between two updates of all that are behind them
_DAMPING = 0.01  # of the Hessian's mean diagonal, added to it
INT4_MAX = 15
_CUT_BITS = 20  # of float32's mantissa, all but e4m3's 3
_SMALLEST_NORMAL = 2.0**-6  # of e4m3
_SHIFTER = 1.5 * 2.0**14  # what is added to it has e4m3's smallest number, 2**-9, as its last bit
_SMALLEST_SCALE = 2.0**-24  # float16's smallest number


class Grid(Protocol):
    """The numbers that a matrix may hold: (code - zero point) * scale."""

    @property
    def group(self) -> int:
        """Columns of a row that share scale and zero point; 0: all."""
        ...

    def propose(self, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scales and zero points, both [rows, 1], that may suit rows of weights [rows, columns]."""
        ...

    def encode(self, weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest codes, as float32."""
        ...

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedMatrix:
        """Return a matrix of codes [rows, columns], with scales and zero points [rows, groups]."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Grid:
    """e4m3, each row with a scale."""

    group: int = 0
    num_scales: int = 24

    def propose(self, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scales over one octave, which nothing is too large for: further ones have the same grid."""
        smallest = weights.abs().amax(1, keepdim=True).clamp_(min=1e-12) / FP8_MAX
        for step in range(self.num_scales):
            scales = smallest * 2 ** (step / self.num_scales)
            yield scales, torch.zeros_like(scales)

    def encode(self, weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Round to e4m3."""
        del zeros
        return round_e4m3(weights / scales)

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedMatrix:
        """Return a matrix in FP8."""
        del zeros
        return QuantizedMatrix(codes.to(FP8), scales)


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """Whole numbers from 0 to 15, groups of columns with a scale (bfloat16) and a zero point."""

    group: int
    num_ranges: int = 16
    narrowest: float = 0.7

    def propose(self, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scales for the whole range of values and for parts of it, each with the zero points that fit."""
        low, high = weights.amin(1, keepdim=True).clamp_(max=0), weights.amax(1, keepdim=True).clamp_(min=0)
        for step in range(self.num_ranges):
            part = 1 - (1 - self.narrowest) * step / self.num_ranges
            scales = make_storable((high - low) * (part / INT4_MAX))
            middle = (-low * part / scales).round_()
            for shift in (0, -1, 1):
                yield scales, (middle + shift).clamp_(0, INT4_MAX)

    def encode(self, weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Round to whole numbers."""
        return (weights / scales).round_().add_(zeros).clamp_(0, INT4_MAX)

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedMatrix:
        """Return a matrix of 4 bits."""
        return QuantizedMatrix(codes.to(torch.uint8), scales, zeros.to(torch.uint8))


def round_e4m3(values: Tensor) -> Tensor:
    """Round float32 to e4m3, ties to even, the largest for what is larger: a tenth of the time of PyTorch's cast."""
    values = values.clamp(-FP8_MAX, FP8_MAX)
    bits = values.view(torch.int32)
    last = (bits >> _CUT_BITS & 1).add_((1 << _CUT_BITS - 1) - 1)
    normal = last.add_(bits).bitwise_and_(-1 << _CUT_BITS).view(torch.float32)
    small = (values + _SHIFTER).sub_(_SHIFTER)
    return torch.where(values.abs() < _SMALLEST_NORMAL, small, normal)


def round_nearest(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> QuantizedMatrix:
    """Round each number of a matrix [out, in] by itself; importance: [in], of its columns' errors."""
    scales, zeros = _fit(weight, grid, torch.ones(weight.shape[1]) if importance is None else importance)
    width = weight.shape[1] // scales.shape[1]
    wide_scales, wide_zeros = scales.repeat_interleave(width, 1), zeros.repeat_interleave(width, 1)
    return grid.pack(grid.encode(weight, wide_scales, wide_zeros), scales, zeros)


def round_matrix(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantizedMatrix:
    """Round a matrix [out, in] for inputs x: hessian [in, in] is their x.T @ x, up to a factor.

    Both float32; the sum of squares of x @ (weight - result).T is small, though not least.
    """
    hessian = _damp(hessian)
    scales, zeros = _fit(weight, grid, hessian.diagonal())
    width = weight.shape[1] // scales.shape[1]
    # What matters most first, while there are others to make up for it.
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor_inverse(hessian[order][:, order])
    rest = weight.T[order]  # [in, out]: a column is contiguous
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)
    pairs = [(scales[:, group].contiguous(), zeros[:, group].contiguous()) for group in range(scales.shape[1])]
    groups = (order // width).tolist()
    for start in range(0, len(groups), _BLOCK):
        stop = min(start + _BLOCK, len(groups))
        for place in range(start, stop):
            scale, zero = pairs[groups[place]]
            column = rest[place]
            codes[place] = grid.encode(column, scale, zero)
            torch.sub(codes[place], zero, out=errors[place]).mul_(scale).sub_(column).div_(factor[place, place])
            rest[place + 1 : stop].addr_(factor[place, place + 1 : stop], errors[place])
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors[start:stop])
    return grid.pack(codes[order.argsort()].T.contiguous(), scales, zeros)


def _fit(weight: Tensor, grid: Grid, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the proposed scales and zero points [rows, groups] with the least error, weighed by importance [in]."""
    width = grid.group or weight.shape[1]
    found = [
        _fit_group(part, grid, weights)
        for part, weights in zip(weight.split(width, 1), importance.split(width), strict=True)
    ]
    return torch.cat([scales for scales, _ in found], 1), torch.cat([zeros for _, zeros in found], 1)


def _fit_group(weight: Tensor, grid: Grid, importance: Tensor) -> tuple[Tensor, Tensor]:
    best = torch.full((len(weight), 1), torch.inf)
    best_scales, best_zeros = torch.ones_like(best), torch.zeros_like(best)
    for scales, zeros in grid.propose(weight):
        errors = (grid.encode(weight, scales, zeros) - zeros).mul_(scales).sub_(weight)
        error = errors.square_().mv(importance)[:, None]
        is_better = error < best
        best = torch.where(is_better, error, best)
        best_scales = torch.where(is_better, scales, best_scales)
        best_zeros = torch.where(is_better, zeros, best_zeros)
    return best_scales, best_zeros


def _damp(hessian: Tensor) -> Tensor:
    """Return the Hessian with a diagonal that makes it invertible, inputs that are always 0 included."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    return hessian + torch.diag(torch.where(diagonal > 0, _DAMPING * mean, mean if mean > 0 else torch.ones(())))


def _factor_inverse(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with U.T @ U = hessian's inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)


def make_storable(scales: Tensor) -> Tensor:
    """Round scales to what checkpoints and packed weights both keep: bfloat16 and float16."""
    return scales.to(torch.bfloat16).to(torch.float16).float().clamp_(min=_SMALLEST_SCALE)
