# SPDX-License-Identifier: Apache-2.0
"""Products with weights in GGUF's blocks, on each instruction set that is here, against the gguf package's values."""

from __future__ import annotations

import gguf
import pytest
import torch

from blink.formats.experts import QuantizedExperts
from blink.formats.gguf import GgufRows
from blink.kernels.cpu.gguf_weight import GgufWeight, Isa, row_bytes
from blink.kernels.moe import moe
from blink.runner.matmul import linear
from gguf_blocks import KINDS, Bytes, check_matmul, dequantize, make_blocks

Kind = gguf.GGMLQuantizationType

isas = pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[] if isa.is_here else pytest.mark.skip("not here")) for isa in list(Isa)[1:]]
)


def make_weight(blocks: Bytes, kind: Kind, columns: int, isa: Isa = Isa.BEST) -> GgufWeight:
    return GgufWeight([GgufRows(int(kind), torch.from_numpy(blocks))], columns, isa)


@isas
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantised_values_are_those_of_the_gguf_package(kind: Kind, isa: Isa) -> None:
    for rows, columns in ((1, 256), (67, 512)):
        blocks = make_blocks(kind, rows, columns, rows)
        assert torch.equal(make_weight(blocks, kind, columns, isa).dequantize(), dequantize(blocks, kind))


@isas
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_equal_those_with_the_dequantised_weight(kind: Kind, isa: Isa) -> None:
    step = gguf.GGML_QUANT_SIZES[kind][0]
    torch.manual_seed(40)
    for weight_rows, columns in ((1, step), (3, 2 * step), (67, 3 * step)):
        blocks = make_blocks(kind, weight_rows, columns, columns)
        weight, expected = make_weight(blocks, kind, columns, isa), dequantize(blocks, kind)
        for rows in (1, 2, 3, 4, 5, 8, 9, 33):
            x = torch.randn(rows, columns)
            check_matmul(weight.multiply(x), x, expected)


@isas
def test_what_a_row_gives_does_not_depend_on_those_beside_it(isa: Isa) -> None:
    weight = make_weight(make_blocks(Kind.Q4_K, 70, 768), Kind.Q4_K, 768, isa)
    x = torch.randn(19, 768)
    together = weight.multiply(x)
    for row in range(len(x)):
        assert torch.equal(weight.multiply(x[row : row + 1])[0], together[row])


def test_parts_of_several_formats_lie_one_below_the_other() -> None:
    made = [(kind, make_blocks(kind, rows, 512, rows)) for kind, rows in zip(KINDS, (5, 130, 1, 64, 31), strict=True)]
    weight = GgufWeight([GgufRows(int(kind), torch.from_numpy(blocks)) for kind, blocks in made], 512)
    expected = torch.cat([dequantize(blocks, kind) for kind, blocks in made])
    assert weight.shape == (231, 512)
    assert weight.nbytes == sum(blocks.nbytes for _, blocks in made)
    assert torch.equal(weight.dequantize(), expected)
    x, bias = torch.randn(6, 512), torch.randn(231)
    check_matmul(linear(x, weight), x, expected)
    torch.testing.assert_close(linear(x, weight, bias), linear(x, weight) + bias)
    rows = torch.tensor([230, 0, 5, 134, 135, 136, 199, 200], dtype=torch.int32)
    assert torch.equal(weight.take_rows(rows), expected[rows])


@pytest.mark.parametrize("row", [-1, 7, 2**31 - 1])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    weight = make_weight(make_blocks(Kind.Q8_0, 7, 64), Kind.Q8_0, 64)
    with pytest.raises(IndexError, match=f"row {row} of a weight of 7 rows"):
        weight.take_rows(torch.tensor([3, row, 0], dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "row_bytes", "columns"),
    [
        (Kind.Q4_1, 20, 64),
        (Kind.Q4_1, 40, 32),
        (Kind.Q4_1, 20, 31),
        (Kind.Q4_K, 144, 128),
        (Kind.F16, 64, 32),
        (99, 20, 32),
    ],
)
def test_blocks_that_do_not_fit_the_columns_are_refused(kind: int, row_bytes: int, columns: int) -> None:
    with pytest.raises(AssertionError):
        GgufWeight([GgufRows(int(kind), torch.zeros(3, row_bytes, dtype=torch.uint8))], columns)


def test_row_sizes_are_those_of_the_gguf_package() -> None:
    found = {kind: size for kind in Kind if (size := row_bytes(kind, 256))}
    assert found == {kind: 256 // values * size for kind in KINDS for values, size in [gguf.GGML_QUANT_SIZES[kind]]}


def test_quantised_experts_give_what_dequantised_ones_give() -> None:
    torch.manual_seed(41)
    gate_up, down = ([make_blocks(Kind.Q8_0, rows, 64, seed) for seed in range(4)] for rows in (128, 64))
    quantised = [
        QuantizedExperts(tuple(make_weight(blocks, Kind.Q8_0, 64) for blocks in experts)) for experts in (gate_up, down)
    ]
    tensors = [torch.stack([dequantize(blocks, Kind.Q8_0) for blocks in experts]) for experts in (gate_up, down)]
    assert [experts.shape for experts in quantised] == [experts.shape for experts in tensors]
    x, logits = torch.randn(5, 64) * 0.1, torch.randn(5, 4)
    found = moe(x, logits, quantised[0], quantised[1], top_k=2, renormalize=True)
    expected = moe(x, logits, tensors[0], tensors[1], top_k=2, renormalize=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
