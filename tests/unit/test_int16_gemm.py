# SPDX-License-Identifier: Apache-2.0
"""GEMMs in integers: against activations that are rounded likewise, and each row by itself."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from blink.formats.gguf import GgufRows
from blink.kernels.cpu.gguf_weight import GgufWeight, Int16Isa
from blink.kernels.rounding import EXACT, Rounding, begin_step
from gguf_blocks import KINDS, dequantize, make_blocks

Kind = gguf.GGMLQuantizationType
HERE = [isa for isa in (Int16Isa.PLAIN, Int16Isa.VNNI) if isa.is_here]
_GROUP = 32  # values of a scale


def multiply(weight: GgufWeight, x: Tensor, isa: Int16Isa) -> Tensor:
    out = torch.full((len(x), weight.shape[0]), torch.nan)
    weight.multiply_int16(x, out, isa)
    return out


def make_weight(kind: Kind, sizes: tuple[int, ...], columns: int) -> tuple[GgufWeight, Tensor]:
    """Return a weight in parts of so many rows, and what it stands for."""
    blocks = [make_blocks(kind, rows, columns, rows) for rows in sizes]
    parts = [GgufRows(int(kind), torch.from_numpy(each)) for each in blocks]
    return GgufWeight(parts, columns), torch.cat([dequantize(each, kind) for each in blocks])


def round_to_int16(x: Tensor) -> Tensor:
    """The oracle: the largest magnitude of 32 values is 32,512."""
    groups = x.view(len(x), -1, _GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 32512
    return (torch.where(scales > 0, groups / scales, 0).round() * scales).view(x.shape)


@pytest.fixture
def rounding() -> None:
    begin_step(Rounding(activations=True), 0, 0)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_those_of_rounded_activations(kind: Kind, isa: Int16Isa) -> None:
    """Parts that end within a tile of 16 rows; numbers of rows that have tiles of their own, and others."""
    step = gguf.GGML_QUANT_SIZES[kind][0]
    torch.manual_seed(57)
    for columns, sizes in ((step, (1, 40)), (3 * step, (67, 33)), (step, (16, 17, 15))):
        weight, values = make_weight(kind, sizes, columns)
        for rows in (1, 2, 3, 5, 8, 11):
            x = torch.randn(rows, columns)
            x[0, :_GROUP] = 0
            rounded = round_to_int16(x).double()
            exact, terms = rounded @ values.double().T, rounded.abs() @ values.double().abs().T
            # A value halfway between two whole numbers may be rounded either way: none is that close here.
            assert ((multiply(weight, x, isa).double() - exact).abs() <= 2e-5 * terms + 1e-30).all()


@pytest.mark.skipif(not Int16Isa.BEST.is_here, reason="needs AVX-512 VNNI")
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_whatever_its_number(kind: Kind) -> None:
    torch.manual_seed(58)
    weight, _ = make_weight(kind, (70, 20), 512)
    x = torch.randn(19, 512)
    together = weight.multiply(x)
    for rows in (1, 2, 3, 4, 7, 8):
        for first in (0, 5, 19 - rows):
            assert torch.equal(weight.multiply(x[first : first + rows]), together[first : first + rows])
    begin_step(EXACT, 0, 0)
    assert not torch.equal(weight.multiply(x), together)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_gives_none(value: float, isa: Int16Isa) -> None:
    """So a step that fails is seen as one: kInvalidLogits."""
    weight, _ = make_weight(Kind.Q8_0, (20,), 64)
    x = torch.ones(2, 64)
    x[1, 40] = value
    found = multiply(weight, x, isa)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
