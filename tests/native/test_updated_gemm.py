# SPDX-License-Identifier: Apache-2.0
"""GEMMs that add low-rank updates to their own sums, as device code on the host's threads, against plain products:
parts of a weight, ranks of several steps, tokens without an adapter, and no read of what is not written yet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from conftest import CompileDevice

_EPS, _MOST = 1e-5, 80
_STORE, _ADD, _GATE = range(3)
_TOKENS = {_STORE: 16, _ADD: 32, _GATE: 24}  # of the kernels' tiles
Multiply = Callable[[Sequence["Tensor | None"], Sequence[int]], None]


@pytest.fixture(scope="module")
def multiply(compile_device: CompileDevice) -> Multiply:
    """Return multiply(tensors, sizes), in the order of the program's structs."""
    words = dict.fromkeys(("common/ptx.cuh", "common/wgmma.cuh", "common/hi_lo.cuh"), "gpu_updates.h")
    run = compile_device("updated_gemm.cpp", "gemm/gemm_updated.cuh", words=words).multiply

    def call(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        run((ctypes.c_void_p * len(tensors))(*pointers), (ctypes.c_int * len(sizes))(*sizes))

    return call


@dataclass
class Case:
    """A product with updates of a weight of several matrices."""

    output: int
    rows: int
    own: list[int]  # 1 + each row's adapter, 0: none; repeated
    rank: int
    parts: list[int]  # rows of each matrix of the weight
    k: int
    ways: int = 16

    def __post_init__(self) -> None:
        torch.manual_seed(self.rows)
        self.total, self.places = sum(self.parts), torch.tensor([*self.own] * self.rows)[: self.rows].int()
        self.count, width = max(*self.own, 1), len(self.parts) * self.rank
        self.weight = (torch.randn(self.total, self.k) * self.k**-0.5).bfloat16()
        self.down = (torch.randn(self.count, width, self.k) * self.k**-0.5).bfloat16()
        self.up = (torch.randn(self.count, self.total, self.rank) * self.rank**-0.5).bfloat16()
        self.x = torch.randn(self.rows, self.k).bfloat16()
        self.tile = 16
        self.part_of_row = torch.arange(len(self.parts)).repeat_interleave(torch.tensor(self.parts))

    def expect(self) -> Tensor:
        """Return the sums in float32; what A gives is rounded in between."""
        sums = self.x.float() @ self.weight.float().T
        for row, place in enumerate(self.places.tolist()):
            if place:
                found = (self.down[place - 1].float() @ self.x[row].float()).bfloat16().float()
                of_rows = found.unflatten(0, (-1, self.rank))[self.part_of_row]
                sums[row] += (self.up[place - 1].float() * of_rows).sum(1)
        return sums

    def run(self, multiply: Multiply) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what the kernels write, what is expected, and the next norm's input, if any."""
        n, tokens = self.total // (2 if self.output == _GATE else 1), _TOKENS[self.output]
        out, next_x = (torch.full((self.rows, n), torch.nan, dtype=torch.bfloat16) for _ in range(2))
        found = torch.full((self.rows, len(self.parts) * self.rank), torch.nan, dtype=torch.bfloat16)
        bias, next_norm, residual = (torch.randn(size, n).bfloat16() for size in (1, 1, self.rows))
        square_sums = torch.full((3, tokens), torch.nan)
        square_sums[:, : self.rows] = torch.rand(3, self.rows) * self.k
        following = torch.full((-(-n // 64) * 2, tokens), torch.nan)  # of each block
        distinct = torch.zeros(_MOST, dtype=torch.int32)
        different = list(dict.fromkeys(place for place in self.places.tolist() if place))
        distinct[: len(different)] = torch.tensor(different)
        tiles = self.part_of_row[:: self.tile].int()
        added = None if self.output == _GATE else bias
        read = [self.weight, self.x, self.down, self.up, tiles, self.places, distinct, added, residual, next_norm]
        sizes = [self.output, self.rows, n, self.k, self.rank, len(self.parts), self.tile]
        ways = min(self.ways, self.rows, self.count)
        multiply([*read, square_sums, found, out, next_x, following], [*sizes, ways, len(square_sums)])
        sums = self.expect()
        if self.output == _ADD:
            return out, sums + residual.float() + bias.float(), [next_x, out.float() * next_norm.float(), following]
        sums = sums * (square_sums[:, : self.rows].sum(0) / self.k + _EPS).rsqrt()[:, None]
        if self.output == _STORE:
            return out, sums + bias.float(), []
        gate, up = sums.chunk(2, 1)
        return out, torch.nn.functional.silu(gate) * up, []


_SHORT = [
    Case(_STORE, 5, [1, 0, 2], 16, [48, 16, 32], 256),
    Case(_ADD, 20, [2, 1], 16, [32, 32], 4672, ways=1),
    Case(_GATE, 23, [0, 3, 1, 3, 2, 0, 4], 16, [80, 80], 256),
]
_LONG = [
    Case(_STORE, 16, [3, 0, 1, 4, 2], 64, [64, 48], 384),
    Case(_ADD, 29, [1, 2, 3, 0, 4, 5, 6, 7, 8], 16, [80], 320),
    Case(_GATE, 9, [1], 128, [64, 64], 128),
]
CASES = [*_SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in _LONG)]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.output}-{case.rows}-{case.rank}")
def test_updates_are_added_to_the_sums_of_their_rows(multiply: Multiply, case: Case) -> None:
    found, expected, following = case.run(multiply)
    for row in range(case.rows):
        assert error(found[row], expected[row]) < 6e-3, row
    if following:
        next_x, wanted, squares = following
        assert error(next_x, wanted) < 4e-3
        sums = squares.sum(0)[: case.rows]
        torch.testing.assert_close(sums, found.float().square().sum(1), rtol=1e-3, atol=1e-3)
