# SPDX-License-Identifier: Apache-2.0
"""How the kernels of few rows split experts: what they choose, their kernels can run; others are left to others."""

from __future__ import annotations

import itertools

import pytest
import torch

from blink.formats.experts import ExpertWeights, Fp8Experts, PackedExperts, experts_of
from blink.formats.fp8 import FP8
from blink.formats.schemes import BF16, FP8_ROW, Encoding, FormatId
from blink.kernels.gpu.moe import decode as moe

_MAX_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("form", moe.ENCODINGS)
def test_chosen_configs_fit_their_kernels(form: Encoding) -> None:
    units = {BF16: 32, FP8_ROW: 64}
    for rows, hidden, size in itertools.product((1, 2, 4, 8), (256, 640, 2048, 4096), (128, 768, 1536, 2048, 4096)):
        gate, down = (
            moe.choose_gate_config(rows, hidden, size, form),
            moe.choose_down_config(rows, size, hidden, form),
        )
        assert gate is not None and (down is not None or rows * size > (4 if form in units else 2) * 4096)
        words = rows * 32 * 8 * moe.count_words(form, size)  # of all experts that rows can choose
        configs = [(gate, hidden, 8, 0)]
        configs += [(down, size, down.outputs + 16 // form.format.bits * rows, words)] if down else []
        for config, k, stage_rows, words in configs:
            assert k % (config.warps * units.get(form, 128)) == 0
            assert config.stages >= 2
            assert config.stages * stage_rows * k * form.format.bits // 8 + 4 * words < _MAX_SHARED_BYTES - (16 << 10)


def make_packed(form: FormatId, rows: int, columns: int) -> PackedExperts:
    return PackedExperts.allocate(form, (32, rows, columns))


def make_fp8(rows: int, columns: int) -> Fp8Experts:
    return Fp8Experts(torch.empty(32, rows, columns, dtype=FP8), torch.empty(32, rows))


@pytest.mark.parametrize(
    ("gate_up", "down", "fits"),
    [
        (make_packed(FormatId.FP8, 256, 256), make_packed(FormatId.FP8, 256, 128), True),
        (make_packed(FormatId.INT4, 256, 256), make_packed(FormatId.INT4, 256, 128), True),
        (make_packed(FormatId.FP8, 416, 272), make_packed(FormatId.FP8, 272, 208), False),  # filled up
        (make_packed(FormatId.MXFP4, 256, 256), make_packed(FormatId.MXFP4, 256, 128), False),
        (make_packed(FormatId.INT4, 256, 256), make_packed(FormatId.FP8, 256, 128), False),
        (make_fp8(256, 256), torch.empty(32, 256, 128), False),
        (make_fp8(192, 256), make_fp8(256, 96), False),
        (torch.empty(32, 192, 256), torch.empty(32, 256, 96), True),
    ],
)
def test_what_weights_the_kernels_read(gate_up: ExpertWeights, down: ExpertWeights, fits: bool) -> None:
    assert (moe.refuses(experts_of(gate_up, down), 2) is None) == fits
