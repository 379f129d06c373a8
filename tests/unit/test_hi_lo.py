# SPDX-License-Identifier: Apache-2.0
"""Two numbers of FP8 hold most of one of bfloat16; hi/lo FP8 lie as packed weights do; every GEMM has a config."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from activation_hi_lo import DIVISOR, join, split
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack
from blink.formats.schemes import FormatId
from blink.kernels.gpu import device
from blink.kernels.gpu.gemm import decode_hi_lo, decode_hi_lo_int4, decode_int4, tile_configs
from blink.kernels.gpu.gemm.pipeline_config import Shape
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.plan.gpus import KNOWN_GPUS

_MAX_SHARED_BYTES = 227 << 10


def all_finite() -> torch.Tensor:
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    return numbers[numbers.isfinite()].view(-1, 128)


def test_planes_keep_six_bits_of_what_is_neither_tiny_nor_huge() -> None:
    x = all_finite()
    found, exact = join(split(x)), x.double()
    inside = (exact.abs() >= 2**-12) & (exact.abs() < 2**16)
    error = (found - exact)[inside] / exact[inside]
    assert float(error.abs().max()) <= 2**-7 and float(error.square().mean().sqrt()) < 0.003
    tiny = exact.abs() < 2**-12
    assert float((found - exact)[tiny].abs().max()) <= 2**-19
    large = (exact.abs() >= 2**16) & (exact.abs() < 2**17)
    assert float(((found - exact)[large] / exact[large]).abs().max()) <= 2**-3
    huge = exact.abs() > 2.0**19
    assert torch.equal(found[huge].sign(), exact[huge].sign()) and float(found[huge].abs().min()) > 2.0**17


def test_one_row_may_have_numbers_of_any_size() -> None:
    x = torch.logspace(-6, 4.477, 1280, dtype=torch.float64).to(torch.bfloat16)[None]
    error = (join(split(x)) - x.double()).abs()
    assert bool((error <= (x.double() * 2**-7).clamp(min=2**-19)).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan(value: float) -> None:
    x = torch.ones(1, 128)
    x[0, 77] = value
    found = join(split(x))
    assert found[0, 77].isnan() and int(found.isnan().sum()) == 1


def test_planes_lie_as_packed_weights_do() -> None:
    values = torch.arange(256).remainder(127).view(1, 256)
    packed = pack([QuantizedMatrix(values.to(torch.uint8).view(FP8), torch.ones(1, 1))])
    numbers = values.to(torch.uint8).view(torch.float8_e5m2).double() * DIVISOR
    kept = numbers.isfinite()
    assert torch.equal(split(numbers)[0][packed_mask(kept)], packed.values[packed_mask(kept)])


def test_planes_for_4_bits_lie_as_the_operands_made_of_words() -> None:
    codes = torch.arange(512).remainder(16).view(1, 512)
    scales, zeros = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.uint8)
    packed = pack([QuantizedMatrix(codes.to(torch.uint8), scales, zeros)]).values
    words = torch.stack([packed & 15, packed >> 4]).view(2, 2, 4, 8, 4)  # odd ones, unit, lane, word, byte
    operands = words.permute(1, 3, 0, 2, 4).reshape(1, 512)
    numbers = codes.to(torch.uint8).view(torch.float8_e5m2).double() * DIVISOR
    assert torch.equal(split(numbers, FormatId.INT4)[0], operands)
    assert torch.equal(join(split(numbers, FormatId.INT4), FormatId.INT4), numbers)


def packed_mask(kept: torch.Tensor) -> torch.Tensor:
    return pack([QuantizedMatrix(kept.to(torch.uint8).view(FP8), torch.ones(1, 1))]).values.bool()


@pytest.mark.parametrize(
    ("kernels", "format", "grouped"),
    [
        (decode_hi_lo, FormatId.FP8, False),
        (decode_hi_lo, FormatId.FP8, True),
        (decode_hi_lo_int4, FormatId.INT4, True),
        (decode_int4, FormatId.INT4, True),
    ],
)
def test_every_product_of_packed_weights_has_a_split_that_fits(
    kernels: ModuleType, format: FormatId, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_supposed", KNOWN_GPUS["h100"])
    monkeypatch.setattr(kernels, "read_table", dict)
    for n, k in itertools.product((16, 256, 6144, 51200), (256, 4096, 5120, 14336, 25600)):
        sizes = [tokens for tokens in (8, 16, 32, 64, 80, 96, 112, 128) if tokens <= kernels.MAX_ROWS]
        for tokens, output in itertools.product(sizes, Output):
            shape = Shape(format, grouped, output, tokens, k, n)
            for found in (kernels.choose_config(shape), *kernels.list_configs(shape)):
                assert found is not None and found.fits(shape, 1) and found.shared_bytes(shape) <= _MAX_SHARED_BYTES


@pytest.mark.parametrize("chosen", [(1, 2, 2, 8), (2, 4, 1, 5), (2, 2, 2, 5)], ids=str)
def test_groups_scales_take_stages_not_blocks(
    chosen: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Shape(FormatId.FP8, False, Output.ADD, 8, 14336, 4096)
    grouped = Shape(FormatId.FP8, True, Output.ADD, 8, 14336, 4096)
    monkeypatch.setattr(decode_hi_lo, "read_table", lambda: {decode_hi_lo.key(plain): list(chosen)})
    measured, found = decode_hi_lo.choose_config(plain), decode_hi_lo.choose_config(grouped)
    assert measured is not None and found is not None and measured == decode_hi_lo.HiLoGemmConfig(*chosen)
    assert (found.groups, found.cluster, found.boxes) == (*chosen[:2], 1)
    most = max(count for count in range(1, 5 - measured.groups) if measured.fits(plain, count))
    assert found.fits(grouped, most) and found.stages <= measured.stages * measured.boxes


def test_keys_of_planes_are_their_own() -> None:
    shape = Shape(FormatId.FP8, False, Output.ADD, 8, 14336, 4096)
    assert decode_hi_lo.key(shape) == f"hi_lo {tile_configs.gemm_key(Output.ADD, 8, 4096, 14336)}"
