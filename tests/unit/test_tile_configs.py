# SPDX-License-Identifier: Apache-2.0
"""The measured configs of decoding rows' kernels name kernels that exist, and so does what is guessed without them; how
many rows take these kernels."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import FormatId
from blink.kernels.gpu import device, launch
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import decode_hi_lo, decode_hi_lo_int4, decode_int4, gemv_quantized, tile_configs
from blink.kernels.gpu.gemm.pipeline_config import PipelineConfig, Shape
from blink.kernels.gpu.gemm.tile_configs import AttentionConfig, GemmConfig, Output
from blink.kernels.gpu.moe import grouped_gemm
from blink.plan.gpus import KnownGpu

_TABLES = json.loads(tile_configs.TABLE.read_text())
_MAX_SHARED_BYTES = 227 << 10
_PACKED: dict[str, tuple[FormatId, type[PipelineConfig]]] = {  # by the kinds of keys
    "hi_lo": (FormatId.FP8, decode_hi_lo.HiLoGemmConfig),
    "hi_lo_int4": (FormatId.INT4, decode_hi_lo_int4.Int4HiLoConfig),
    "int4": (FormatId.INT4, decode_int4.Int4GemmConfig),
}


def _pretend(monkeypatch: pytest.MonkeyPatch, name: str, SMs: int, *, major: int = 12) -> None:
    """Let the GPU be another one."""
    monkeypatch.setattr(device, "_supposed", KnownGpu(name, (major, 0), SMs, 228 << 10, 80 << 30, 3e12))


@pytest.mark.parametrize("device", list(_TABLES))
def test_measured_configs_fit_their_kernels(device: str) -> None:
    for key, numbers in _TABLES[device]["configs"].items():
        kind, count, *sizes = key.split()
        if kind == "attend":
            assert AttentionConfig(*numbers).shared_bytes(group=8, head_dim=128) <= _MAX_SHARED_BYTES, key
        elif kind == "few":
            rows, k, n = int(sizes[0]), int(sizes[2]), int(sizes[4])
            few = gemv_quantized.Shape(FormatId[count.upper()], count == "int4", rows, k, n)
            config = gemv_quantized.QuantizedGemvConfig(*numbers)
            assert gemv_quantized.shared_bytes(few, config) <= _MAX_SHARED_BYTES, key
        elif kind in _PACKED:
            format, make = _PACKED[kind]
            tokens, k, n = int(sizes[0]), int(sizes[2]), int(sizes[4])
            shape = Shape(format, format is FormatId.INT4, Output[count.upper()], tokens, k, n)
            assert make(*numbers).fits(shape, 1), key
        else:
            assert GemmConfig(*numbers).fits(Output[kind.upper()], int(count)), key


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("output", list(Output), ids=lambda output: output.name)
def test_unknown_gpus_and_shapes_get_a_split_that_fits(
    output: Output, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (20, 132, 400):
        _pretend(monkeypatch, "a card of the future", count)
        for n in (16, 4096, 6144, 28672, 151936):
            assert tile_configs.choose_gemm_config(output, tokens, n, 4096).fits(output, tokens)


def test_a_gpu_like_a_measured_one_takes_its_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _TABLES["NVIDIA H200"]["configs"]
    _pretend(monkeypatch, "NVIDIA H100 80GB HBM3", 132, major=9)
    assert tile_configs.read_table() == measured
    _pretend(monkeypatch, "NVIDIA H100 PCIe", 114, major=9)
    assert not tile_configs.read_table()
    _pretend(monkeypatch, "NVIDIA H200", 114, major=9)  # by its name, whatever a part of it offers
    assert tile_configs.read_table() == measured


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("format", [FormatId.FP8, FormatId.INT4], ids=lambda format: format.name)
def test_every_quantized_product_has_a_split_that_fits(
    format: FormatId, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, "a card of the future", 132)
    for n, k in itertools.product((16, 256, 6144, 51200), (256, 4096, 5120, 14336)):
        for rows in (1, 2):
            few = gemv_quantized.Shape(format, grouped, rows, k, n)
            config = gemv_quantized.choose_config(few)
            assert config is not None and gemv_quantized.shared_bytes(few, config) <= _MAX_SHARED_BYTES
            assert k % (format.unit * config.slices * config.warps * config.cluster) == 0


def test_rows_are_rounded_up_to_what_a_product_takes() -> None:
    padded = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 80, 80: 80, 81: 96, 97: 112, 128: 128}
    assert {rows: tile_configs.bucket_rows(rows) for rows in padded} == padded
    finely = padded | {17: 24, 24: 24, 25: 32, 33: 48, 48: 48, 49: 64}
    assert {rows: tile_configs.bucket_rows(rows, plain=True) for rows in finely} == finely


def test_rows_without_an_own_measurement_use_that_of_the_next_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "a card of the future", 132)
    monkeypatch.setattr(tile_configs, "read_table", lambda: {"gate 64 x 4096 x 28672": [1, 2, 64, 5]})
    measured = tile_configs.choose_gemm_config(Output.GATE, 48, 28672, 4096)
    assert measured == GemmConfig(1, 2, 64, 5) and measured.fits(Output.GATE, 48)
    assert tile_configs.choose_gemm_config(Output.GATE, 32, 28672, 4096) != measured
    assert tile_configs.choose_gemm_config(Output.GATE, 80, 28672, 4096) != measured


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("output", list(Output), ids=lambda output: output.name)
def test_measured_candidates_fit_and_share_activations_of_many_rows(output: Output, tokens: int) -> None:
    tried = list(tile_configs.list_gemm_configs(output, tokens))
    assert 10 < len(tried) <= 48 and all(config.fits(output, tokens) for config in tried)
    most = 4 if tokens > 64 and output is not Output.ADD else 2
    assert max(config.groups for config in tried) == most
    if tokens > 64:  # beside the resident scheduler, large clusters need blocks of which two fit
        assert all(
            config.cluster < 4 or 2 * config.shared_bytes(output, tokens) <= _MAX_SHARED_BYTES for config in tried
        )


@pytest.mark.parametrize("hi_lo", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64, 65, 96, 129, 200, 256])
def test_experts_rows_get_tiles_that_fit_and_mostly_suffice(rows: int, hi_lo: bool) -> None:
    places = grouped_gemm.count_places(rows)
    assert rows <= places < rows + 32
    for mean, k in itertools.product((0.1, 4, 5, 8, 12, 16, 256), (128, 768, 2048)):
        config = grouped_gemm.choose_config(places, mean, k, hi_lo=hi_lo)
        assert places % config.tokens == 0 and config.groups in (1, 2)
        assert k % config.stage_k(1 if hi_lo else 2) == 0
        stages = config.stages(hi_lo=hi_lo)
        size = stages * config.stage_bytes(hi_lo=hi_lo) + config.other_bytes()
        assert stages >= 3 and (size + 1024) * config.blocks <= 228 << 10
        assert config.tokens >= min(1.5 * mean, places, 32)


def test_packed_weights_have_no_products_of_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: True)
    _pretend(monkeypatch, "a card of the future", 132)
    for one, most in ((pack([quantize_fp8(torch.randn(64, 256))]), 64), (_pack_int4(64), 128)):
        refusals = [gemm.refuses(one.matrix, rows) for rows in (most, most + 1)]
        assert refusals == [None, f"more than {most} rows"]


def _pack_int4(rows: int) -> PackedWeight:
    codes, zeros = torch.randint(0, 16, (rows, 256), dtype=torch.uint8), torch.full((rows, 2), 8, dtype=torch.uint8)
    return pack([QuantizedMatrix(codes, torch.ones(rows, 2), zeros)])


def test_kernels_are_compiled_ahead_without_being_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, str, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(launch, "_compile", lambda *kernel: compiled.append(kernel))

    def run() -> None:
        for name in ("first", "second", "first"):
            launch.launch(launch.compile_kernel(name, "a.cu"), (1, 1), 32, b"")

    launch.compile_ahead(run)
    assert sorted(compiled) == [("first", "a.cu", 1), ("second", "a.cu", 1)]
    launch.compile_ahead(lambda: None)
    launch.compile_kernel("third", "a.cu")
    assert compiled[2:] == [("third", "a.cu", 1)]
