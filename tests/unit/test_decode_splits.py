# SPDX-License-Identifier: Apache-2.0
"""The measured splits of decoding rows' kernels name kernels that exist, and so does what is guessed without them; how
many rows take these kernels."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import blink.models
from blink.formats.base import Weight
from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import FormatId
from blink.kernels.gpu.decode import (
    gemm,
    gemm_int4,
    gemm_planes,
    gemm_planes_int4,
    gemv_quantized,
    grouped_gemm,
    launch,
    splits,
)
from blink.kernels.gpu.decode.ring_split import RingSplit, Shape
from blink.kernels.gpu.decode.splits import AttentionSplit, GemmSplit, Output
from blink.models import decode_step
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights
from blink.models.layers import MoeMlp, Router
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec

_TABLES = json.loads(splits.TABLE.read_text())
_MAX_SHARED_BYTES = 227 << 10
_PACKED: dict[str, tuple[FormatId, type[RingSplit]]] = {  # by the kinds of keys
    "planes": (FormatId.FP8, gemm_planes.PlanesGemmSplit),
    "planes4": (FormatId.INT4, gemm_planes_int4.Int4PlanesSplit),
    "int4": (FormatId.INT4, gemm_int4.Int4GemmSplit),
}
_CONFIGS = Path(blink.models.__path__[0]) / "configs"
_CACHED = [kernels._guess_split for kernels in (gemv_quantized, gemm_planes, gemm_planes_int4, gemm_int4)] + [
    splits.read_table
]


@pytest.fixture(autouse=True)
def _forget_gpus() -> Iterator[None]:
    yield
    for cached in _CACHED:
        cached.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch, name: str, multiprocessors: int, *, major: int = 12) -> None:
    """Let the GPU be another one."""
    gpu = SimpleNamespace(multi_processor_count=multiprocessors, major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    for cached in _CACHED:
        cached.cache_clear()


@pytest.mark.parametrize("device", list(_TABLES))
def test_measured_splits_fit_their_kernels(device: str) -> None:
    for key, numbers in _TABLES[device]["splits"].items():
        kind, count, *sizes = key.split()
        if kind == "attend":
            assert AttentionSplit(*numbers).shared_bytes(group=8, head_dim=128) <= _MAX_SHARED_BYTES, key
        elif kind == "few":
            rows, k, n = int(sizes[0]), int(sizes[2]), int(sizes[4])
            few = gemv_quantized.Shape(FormatId[count.upper()], count == "int4", rows, k, n)
            split = gemv_quantized.QuantizedSplit(*numbers)
            assert gemv_quantized.shared_bytes(few, split) <= _MAX_SHARED_BYTES, key
        elif kind in _PACKED:
            format, make = _PACKED[kind]
            tokens, k, n = int(sizes[0]), int(sizes[2]), int(sizes[4])
            shape = Shape(format, format is FormatId.INT4, Output[count.upper()], tokens, k, n)
            assert make(*numbers).fits(shape, 1), key
        else:
            assert GemmSplit(*numbers).fits(Output[kind.upper()], int(count)), key


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("output", list(Output), ids=lambda output: output.name)
def test_unknown_gpus_and_shapes_get_a_split_that_fits(
    output: Output, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (20, 132, 400):
        _pretend(monkeypatch, "a card of the future", count)
        for n in (16, 4096, 6144, 28672, 151936):
            assert splits.choose_gemm_split(output, tokens, n, 4096).fits(output, tokens)


def test_a_gpu_like_a_measured_one_takes_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _TABLES["NVIDIA H200"]["splits"]
    _pretend(monkeypatch, "NVIDIA H100 80GB HBM3", 132, major=9)
    assert splits.read_table() == measured
    _pretend(monkeypatch, "NVIDIA H100 PCIe", 114, major=9)
    assert not splits.read_table()
    _pretend(monkeypatch, "NVIDIA H200", 114, major=9)  # by its name, whatever a part of it offers
    assert splits.read_table() == measured


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("format", [FormatId.FP8, FormatId.INT4], ids=lambda format: format.name)
def test_every_quantized_product_has_a_split_that_fits(
    format: FormatId, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, "a card of the future", 132)
    for n, k in itertools.product((16, 256, 6144, 51200), (256, 4096, 5120, 14336)):
        for rows in (1, 2):
            few = gemv_quantized.Shape(format, grouped, rows, k, n)
            split = gemv_quantized.choose_split(few)
            assert split is not None and gemv_quantized.shared_bytes(few, split) <= _MAX_SHARED_BYTES
            assert k % (format.unit * split.slices * split.warps * split.cluster) == 0


def test_rows_are_rounded_up_to_what_a_product_takes() -> None:
    padded = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 80, 80: 80, 81: 96, 97: 112, 128: 128}
    assert {rows: splits.pad_rows(rows) for rows in padded} == padded
    finely = padded | {17: 24, 24: 24, 25: 32, 33: 48, 48: 48, 49: 64}
    assert {rows: splits.pad_rows(rows, fine=True) for rows in finely} == finely


def test_rows_without_an_own_measurement_use_that_of_the_next_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "a card of the future", 132)
    monkeypatch.setattr(splits, "read_table", lambda: {"gate 64 x 4096 x 28672": [1, 2, 64, 5]})
    measured = splits.choose_gemm_split(Output.GATE, 48, 28672, 4096)
    assert measured == GemmSplit(1, 2, 64, 5) and measured.fits(Output.GATE, 48)
    assert splits.choose_gemm_split(Output.GATE, 32, 28672, 4096) != measured
    assert splits.choose_gemm_split(Output.GATE, 80, 28672, 4096) != measured


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("output", list(Output), ids=lambda output: output.name)
def test_measured_candidates_fit_and_share_activations_of_many_rows(output: Output, tokens: int) -> None:
    tried = list(splits.list_gemm_splits(output, tokens))
    assert 10 < len(tried) <= 48 and all(split.fits(output, tokens) for split in tried)
    most = 4 if tokens > 64 and output is not Output.ADD else 2
    assert max(split.groups for split in tried) == most
    if tokens > 64:  # beside the resident scheduler, large clusters need blocks of which two fit
        assert all(split.cluster < 4 or 2 * split.shared_bytes(output, tokens) <= _MAX_SHARED_BYTES for split in tried)


def _decodes(spec: ModelSpec, rows: int) -> bool:
    return decode_step.refuses(spec, torch.bfloat16, rows, 16) is None


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_steps_of_more_than_128_rows_take_the_general_way(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "refuses_attention", lambda *_: None)
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: True)
    spec: ModelSpec = read_spec(_CONFIGS / model)
    taken = [rows for rows in (16, 64, 65, 96, 128, 129, 256) if _decodes(spec, rows)]
    assert taken == [16, 64, 65, 96, 128]


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64, 65, 96, 129, 200, 256])
def test_experts_rows_get_tiles_that_fit_and_mostly_suffice(rows: int, planes: bool) -> None:
    places = grouped_gemm.count_places(rows)
    assert rows <= places < rows + 32
    for mean, k in itertools.product((0.1, 4, 5, 8, 12, 16, 256), (128, 768, 2048)):
        split = grouped_gemm.choose_split(places, mean, k, planes=planes)
        assert places % split.tokens == 0 and split.groups in (1, 2)
        assert k % split.stage_k(1 if planes else 2) == 0
        stages = split.stages(planes=planes)
        size = stages * split.stage_bytes(planes=planes) + split.other_bytes()
        assert stages >= 3 and (size + 1024) * split.blocks <= 228 << 10
        assert split.tokens >= min(1.5 * mean, places, 32)


def test_experts_that_cannot_be_streamed_are_grouped_from_3_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "refuses_attention", lambda *_: None)
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: True)
    _pretend(monkeypatch, "a card of the future", 132)
    spec = read_spec(_CONFIGS / "qwen3-30b-a3b")
    assert spec.mixture is not None
    few = dataclasses.replace(spec.mixture, experts=8)
    spec = spec.with_layers(lambda layer: dataclasses.replace(layer, mlp=few))
    taken = [rows for rows in (1, 2, 3, 4, 5, 8, 64) if _decodes(spec, rows)]
    assert taken == [3, 4, 5, 8, 64]


def test_packed_weights_have_no_products_of_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: True)
    _pretend(monkeypatch, "a card of the future", 132)
    for one, most in ((pack([quantize_fp8(torch.randn(64, 256))]), 64), (_pack_int4(64), 128)):
        assert gemm.can_multiply_packed(one, most) and not gemm.can_multiply_packed(one, most + 1)


def test_layers_of_4_bits_decode_fewer_rows_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: True)
    _pretend(monkeypatch, "a card of the future", 132)
    matrix, experts = torch.zeros(64, 256), torch.zeros(4, 64, 256)
    moe_spec = MoeMlp(experts=4, size=32, router=Router(top_k=2))
    dense, mixture = DenseWeights(_pack_int4(128), _pack_int4(64)), MoeWeights(moe_spec, matrix, experts, experts)
    for mlp, most in ((dense, 128), (mixture, 64)):
        layer = LayerWeights(
            attention_norm=None, qkv=_pack_int4(64), qkv_bias=None, output=_pack_int4(64), output_bias=None,
            head_norm=None, mlp_norm=None, mlp=mlp,
        )  # fmt: skip
        assert decode_step.can_multiply_packed([layer], matrix, most)
        assert not decode_step.can_multiply_packed([layer], matrix, most + 1)


def _layer_of(weight: Weight) -> LayerWeights:
    """Return a dense layer of one square matrix, whatever it is to multiply."""
    return LayerWeights(
        attention_norm=None, qkv=weight, qkv_bias=None, output=weight, output_bias=None,
        head_norm=None, mlp_norm=None, mlp=DenseWeights(weight, weight),
    )  # fmt: skip


@pytest.mark.parametrize("packed_layers", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_a_packed_layer_among_others_takes_no_mixed_steps(
    packed_layers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_step, "refuses", lambda *_: None)
    plain, packed = torch.zeros(64, 256), _pack_int4(64)
    layers = [_layer_of(packed if index in packed_layers else plain) for index in range(3)]
    spec = read_spec(_CONFIGS / "llama-3-8b")
    assert not decode_step.can_mix(spec, torch.bfloat16, 16, layers, 16)
    assert decode_step.can_mix(spec, torch.bfloat16, 16, [_layer_of(plain)] * 3, 16)


def test_4_bits_in_some_layers_are_not_4_bits_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 bits throughout, more rows take the kernels for few of them."""
    monkeypatch.setattr(gemm, "has_warpgroups", lambda: False)
    monkeypatch.setattr(gemv_quantized, "can_multiply", lambda *_: True)
    plain, packed, rows = torch.zeros(64, 256), _pack_int4(64), decode_step.MAX_INT4_GEMV_ROWS
    assert decode_step.can_multiply_packed([_layer_of(packed)] * 2, plain, rows)
    assert not decode_step.can_multiply_packed([_layer_of(packed), _layer_of(plain)], plain, rows)
    assert not decode_step.can_multiply_packed([_layer_of(plain), _layer_of(packed)], plain, rows)


def _pack_int4(rows: int) -> PackedWeight:
    codes, zeros = torch.randint(0, 16, (rows, 256), dtype=torch.uint8), torch.full((rows, 2), 8, dtype=torch.uint8)
    return pack([QuantizedMatrix(codes, torch.ones(rows, 2), zeros)])


def test_kernels_are_compiled_ahead_without_being_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, str]] = []
    monkeypatch.setattr(launch, "_compile", lambda *kernel: compiled.append(kernel))

    def run() -> None:
        for name in ("first", "second", "first"):
            launch.launch(launch.compile_kernel(name, "a.cu"), (1, 1), 32, b"")

    launch.compile_ahead(run)
    assert sorted(compiled) == [("first", "a.cu"), ("second", "a.cu")]
    launch.compile_ahead(lambda: None)
    launch.compile_kernel("third", "a.cu")
    assert compiled[2:] == [("third", "a.cu")]
