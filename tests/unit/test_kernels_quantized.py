# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: packing loses nothing, and rounding to FP8 no more than the format must."""

from __future__ import annotations

import pytest
import torch

from blink.formats.fp8 import FP8, quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack, unpack
from blink.formats.schemes import GROUP
from blink.formats.schemes import FormatId as Format


def draw_int4(rows: int, columns: int) -> QuantizedMatrix:
    groups = columns // GROUP
    scales = (torch.rand(rows, groups) + 0.1).to(torch.float16).float()
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    return QuantizedMatrix(values, scales, torch.randint(0, 17, (rows, groups), dtype=torch.uint8))


def draw_fp8(rows: int, columns: int, groups: int) -> QuantizedMatrix:
    return QuantizedMatrix(torch.randn(rows, columns).to(FP8), torch.rand(rows, groups) + 0.1)


@pytest.mark.parametrize("kind", ["rows", "groups", "int4"])
def test_packing_loses_nothing(kind: str) -> None:
    torch.manual_seed(1)
    parts = [
        draw_int4(rows, 512) if kind == "int4" else draw_fp8(rows, 512, 1 if kind == "rows" else 4) for rows in (24, 8)
    ]
    weight = pack(parts)
    assert weight.shape == (32, 512)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(unpack(weight).dequantize(torch.float32), expected)


def test_lanes_of_a_matrix_instruction_find_their_weights() -> None:
    """Lane q's bytes of a unit: at step s, of k 16 * s + 2 * q, the next, + 8, + 9."""
    codes = torch.arange(128, dtype=torch.uint8) % 126  # no NaN
    packed = pack([QuantizedMatrix(codes.view(FP8)[None], torch.ones(1, 1))])
    for lane in range(4):
        for step in range(8):
            start = 16 * step + 2 * lane
            found = packed.values[0, lane * 32 + step * 4 :][:4].tolist()
            assert found == [int(codes[start + offset]) for offset in (0, 1, 8, 9)]
    assert packed.format is Format.FP8


def test_lanes_find_their_weights_of_4_bits() -> None:
    """The word of two steps: its bits 4 * (2 * step + half) and 16 further are two neighbouring k."""
    part = draw_int4(1, 256)
    assert part.zeros is not None
    words = pack([part]).values.view(torch.int32)[0].tolist()
    for lane in range(4):
        for step in range(16):
            word = words[lane * 8 + step // 2]
            for half in range(2):
                shift = 4 * (step % 2 * 2 + half)
                start = 16 * step + 8 * half + 2 * lane
                assert [word >> shift & 15, word >> shift + 16 & 15] == part.values[0, start : start + 2].tolist()


def test_rounding_to_fp8_is_as_fine_as_its_mantissa() -> None:
    torch.manual_seed(2)
    weight = torch.randn(40, 300) * torch.logspace(-3, 3, 40)[:, None]
    weight[3] = 0
    rounded = quantize_fp8(weight).dequantize(torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    # Half a unit in the last of 3 bits, or of the smallest steps of a row.
    assert ((rounded - weight).abs() <= torch.maximum(weight.abs() * 2**-4, largest * 2**-9 / 448) + 1e-20).all()
    assert torch.equal(rounded[3], torch.zeros(300))
