# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weights of 8 and 4 bits, with hi/lo FP8 of activations or with these themselves, and what writes hi/lo FP8,
beside plain references."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from activation_hi_lo import join, split
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu.activation import activate
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.gpu.device import has_clusters, has_warpgroups
from blink.kernels.layer_cache import LayerCache
from model_driver import compute_decoded_logits, load_decoder
from quantized_checkpoints import write_checkpoints

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import decode_hi_lo, decode_hi_lo_int4, decode_int4, gemm_kernel, tile_configs
from blink.kernels.gpu.launch import compile_kernel

pytestmark = pytest.mark.skipif(not has_clusters() or not has_warpgroups(), reason="needs Hopper")

EPS = 1e-5
KINDS = ["rows", "groups", "int4"]
FORMATS = [FormatId.FP8, FormatId.INT4]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def draw_weight(kind: str, n: int, k: int) -> tuple[PackedWeight, Tensor]:
    """Return a packed weight and what it stands for, in float32."""
    sizes = (n, 1 if kind == "rows" else k // GROUP)
    scales = (torch.rand(sizes, device="cuda") + 0.5) * k**-0.5
    if kind == "int4":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales = (scales / 4).to(torch.float16).float()
        matrix = QuantizedMatrix(codes, scales, torch.randint(0, 17, sizes, dtype=torch.uint8, device="cuda"))
    else:
        matrix = QuantizedMatrix((torch.randn(n, k, device="cuda") / 2**0.5).to(FP8), scales)
    return pack([matrix]), matrix.dequantize(torch.float32)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_torch(x.float(), weight.float(), EPS)


def take(x: Tensor, weight: PackedWeight) -> Tensor:
    """Return activations as GEMMs with a weight take so many rows."""
    order = gemm.order_for(weight.matrix, len(x))
    return x if order is None else split(x, order)


def norm_of(x: Tensor, norm_weight: Tensor, weight: PackedWeight) -> gemm.NormInput:
    square_sums = torch.full((1, tile_configs.bucket_rows(x.shape[0])), torch.nan, device="cuda")
    square_sums[:, : x.shape[0]] = x.float().square().sum(1)
    return gemm.NormInput(take((x.float() * norm_weight.float()).to(torch.bfloat16), weight), square_sums)


def check_matmuls(kind: str, rows: int, n: int, k: int) -> None:
    """Check all outputs; n: a multiple of 128, what hi/lo FP8 are written of."""
    x, norm_weight, next_norm, residual = draw(rows, k), draw(k), draw(n), draw(rows, n)
    bias, (weight, plain) = draw(n), draw_weight(kind, n, k)
    expected = functional.linear(normed(x, norm_weight), plain, bias.float())
    assert error(gemm.normed_linear(norm_of(x, norm_weight, weight), EPS, weight, bias), expected) < 1e-2
    product = functional.linear(x.float(), plain)
    assert error(gemm.linear(take(x, weight), weight), product) < 1e-2
    for hi_lo in (None, *FORMATS):
        found = residual.clone()
        following = gemm.add_linear(take(x, weight), weight, found, next_norm, hi_lo=hi_lo)
        assert error(found, residual.float() + product) < 1e-2
        next_x = found * next_norm
        assert torch.equal(following.x, next_x if hi_lo is None else split(next_x, hi_lo))
        assert error(following.square_sums.sum(0)[:rows], found.float().square().sum(1)) < 1e-4
    weight, plain = draw_weight(kind, 2 * n, k)
    expected = activate(functional.linear(normed(x, norm_weight), plain))
    gated = gemm.gated_linear(norm_of(x, norm_weight, weight), EPS, weight)
    assert error(gated, expected) < 1e-2
    for hi_lo in FORMATS:
        found = gemm.gated_linear(norm_of(x, norm_weight, weight), EPS, weight, hi_lo=hi_lo)
        assert torch.equal(found, split(gated, hi_lo))


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 128, 256), (5, 256, 128), (8, 1024, 4096), (13, 384, 14336), (16, 640, 384), (29, 256, 1280), (32, 1152, 2048),
     (33, 128, 640), (64, 1024, 4096)],
)  # fmt: skip
def test_products_equal_those_of_the_dequantised_weight(kind: str, rows: int, n: int, k: int) -> None:
    torch.manual_seed(1)
    check_matmuls(kind, rows, n, k)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 128, 256), (5, 256, 768), (8, 1024, 4096), (13, 384, 14336), (16, 640, 512), (29, 256, 1280), (32, 1152, 2048),
     (33, 128, 768), (64, 1024, 4096), (65, 256, 768), (96, 384, 14336), (128, 256, 1024)],
)  # fmt: skip
def test_products_of_4_bits_equal_those_of_the_dequantised_weight(rows: int, n: int, k: int) -> None:
    torch.manual_seed(1)
    check_matmuls("int4", rows, n, k)


@pytest.mark.parametrize(("kind", "rows"), [*itertools.product(KINDS, (7, 20, 60)), ("int4", 90)])
def test_rows_of_a_weight_need_not_fill_a_tile(kind: str, rows: int) -> None:
    torch.manual_seed(2)
    x = draw(rows, 768)
    for n in (8, 72, 200):
        weight, plain = draw_weight(kind, n, 768)
        assert error(gemm.linear(take(x, weight), weight), functional.linear(x.float(), plain)) < 1e-2


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        *itertools.product((8, 12), [(1, 2, 1, 3), (2, 4, 2, 2), (2, 2, 1, 5), (1, 2, 2, 4), (4, 8, 1, 3)]),
        *itertools.product((27,), [(1, 2, 1, 3), (4, 4, 1, 3), (4, 8, 1, 4)]),
        *itertools.product((60,), [(1, 2, 1, 3), (2, 4, 1, 3)]),
    ],
    ids=str,
)
def test_any_split_gives_the_same_products(
    rows: int, chosen: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(decode_hi_lo, "choose_config", lambda _: decode_hi_lo.HiLoGemmConfig(*chosen))
    check_matmuls("rows", rows, 256, 2816)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        *itertools.product((8,), [(1, 2, 3), (2, 4, 2), (2, 2, 5), (1, 4, 4)]),
        (12, (2, 8, 3)),
        *itertools.product((27,), [(1, 2, 2), (4, 4, 4), (2, 8, 3)]),
        *itertools.product((60,), [(1, 4, 3), (2, 2, 2), (4, 4, 3)]),
        *itertools.product((90, 120), [(1, 2, 2), (2, 2, 2), (4, 4, 2)]),
    ],
    ids=str,
)
def test_any_split_gives_the_same_products_of_4_bits(
    rows: int, chosen: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    kernels = gemm.kernels_for(FormatId.INT4, tile_configs.bucket_rows(rows))
    config = (decode_int4.Int4GemmConfig if kernels is decode_int4 else decode_hi_lo_int4.Int4HiLoConfig)(*chosen)
    fits = {output: tile_configs.can_share(output, config.tile, config.cluster) for output in tile_configs.Output}
    choose = kernels.choose_config
    monkeypatch.setattr(kernels, "choose_config", lambda shape: config if fits[shape.output] else choose(shape))
    check_matmuls("int4", rows, 256, 2816)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [6, 16, 23, 64])
def test_what_planes_hold_of_activations_is_kept(kind: str, rows: int) -> None:
    torch.manual_seed(4)
    size = 768
    x = (1 + 0.99 * torch.rand(rows, size, device="cuda")) * 2.0 ** torch.randint(-12, 15, (rows, size), device="cuda")
    x = x * torch.randint(0, 2, (rows, size), device="cuda").mul(2).sub(1)
    x[2], x[3], x[4] = 0, 1, x[4] * 16
    x[3, 77], x[5] = 3e4, 2.0**-12
    x = x.to(torch.bfloat16)
    held = join(split(x)).to(torch.bfloat16)
    scales = torch.ones(size, 1 if kind == "rows" else size // GROUP, device="cuda")
    ones, zeros = torch.eye(size, device="cuda"), torch.zeros_like(scales, dtype=torch.uint8)
    matrix = QuantizedMatrix(ones.byte(), scales, zeros) if kind == "int4" else QuantizedMatrix(ones.to(FP8), scales)
    weight = pack([matrix])
    assert torch.equal(gemm.linear(take(x, weight), weight), x if gemm.order_for(weight.matrix, rows) is None else held)


@pytest.mark.parametrize(
    ("rows", "boxes", "k"), [(8, 1, 4096), (8, 2, 4096), (16, 2, 14336), (32, 1, 14336), (64, 1, 4096)]
)
def test_products_are_about_as_exact_as_their_results_rounding(
    rows: int, boxes: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_hi_lo, "choose_config", lambda _: decode_hi_lo.HiLoGemmConfig(1, 2, boxes, 4))
    check_exactness("rows", rows, k, 2.5)


@pytest.mark.parametrize(("rows", "k"), [(8, 4096), (16, 14336), (32, 14336), (64, 4096)])
def test_products_of_4_bits_are_about_as_exact_as_their_results_rounding(rows: int, k: int) -> None:
    check_exactness("int4", rows, k, 2.7)  # what activations add up to is rounded, too


def check_exactness(kind: str, rows: int, k: int, limit: float) -> None:
    torch.manual_seed(5)
    x = draw(rows, k)
    x[1] *= 1e4
    x[2] *= 1e-2
    weight, plain = draw_weight(kind, 512, k)
    expected = functional.linear(x.double(), plain.double())
    found, rounded = gemm.linear(take(x, weight), weight), expected.to(torch.bfloat16)
    for row in range(3):  # each on its own: magnitudes differ
        lost = (rounded[row].double() - expected[row]).norm()
        assert float((found[row].double() - expected[row]).norm() / lost) < limit


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [5, 33])
@pytest.mark.parametrize("kind", ["rows", "int4"])
def test_what_is_not_finite_stays_so_in_its_row_alone(value: float, rows: int, kind: str) -> None:
    torch.manual_seed(6)
    x = draw(rows, 512)
    weight, _ = draw_weight(kind, 128, 512)
    expected = gemm.linear(take(x, weight), weight)
    x[1, 300] = value
    found = gemm.linear(take(x, weight), weight)
    assert not found[1].isfinite().any()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("rows", [3, 33])
@pytest.mark.parametrize("format", FORMATS)
def test_embeddings_are_written_as_planes(rows: int, format: FormatId) -> None:
    torch.manual_seed(7)
    table = draw(100, 640) * 2.0 ** torch.randint(-30, 40, (100, 1), device="cuda").bfloat16()
    norm = draw(640)
    table[5, 3], table[4, 4] = torch.nan, torch.inf
    ids = torch.arange(rows, dtype=torch.int32, device="cuda") * 3 % 100
    ids[:2] = torch.tensor([5, 4])
    residual, plain = gemm.embed(ids, table, norm)
    also, found = gemm.embed(ids, table, norm, hi_lo=format)
    assert torch.equal(also.view(torch.int16), residual.view(torch.int16))
    assert torch.equal(found.square_sums[0, 2:rows], plain.square_sums[0, 2:rows])
    assert torch.equal(join(found.x, format).isnan(), join(split(plain.x)).isnan())
    finite = plain.x.isfinite().all(1)
    assert int(finite.sum()) >= rows - 2 and torch.equal(found.x[:, finite], split(plain.x, format)[:, finite])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (6, 2, 64), (10, 2, 128)])
def test_attention_is_written_as_planes(heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(8)
    rows, block_size, context = 9, 16, 40
    batch = Batch.allocate(
        max_tokens=rows, max_rows=rows, num_slots=rows, max_blocks=3, max_model_len=64, device="cuda"
    )
    batch.header[Header.NUM_ROWS] = batch.header[Header.NUM_TOKENS] = rows
    batch.positions.fill_(context - 1)
    batch.context_lens.fill_(context)
    batch.context_lens[4] = 0
    batch.row_slots.copy_(torch.arange(rows))
    batch.block_tables.copy_(torch.randperm(rows * 3).view(rows, 3))
    batch.kv_slots.copy_(batch.block_tables[:, 2] * block_size + (context - 1) % block_size)
    qkv, table = draw(rows, (heads + 2 * kv_heads) * head_dim), torch.randn(64, head_dim, device="cuda")
    cache = draw(2, rows * 3, block_size, kv_heads, head_dim)
    expected = decode_attention(qkv, LayerCache(cache.clone()), batch, table)
    for format in FORMATS:
        found = decode_attention(qkv, LayerCache(cache.clone()), batch, table, hi_lo=format)
        assert torch.equal(found, split(expected, format))


@pytest.mark.parametrize(
    ("scheme", "quantization"),
    [("fp8-channel", "auto"), ("fp8-block", "auto"), ("fp8-channel", "fp8"), ("awq", "auto"), ("gptq", "auto")],
)
def test_models_give_the_logits_of_their_dequantised_weights(
    tmp_path: Path, scheme: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = write_checkpoints(tmp_path, scheme)
    if quantization == "fp8":  # the head's weights are FP8 as well
        path = plain
    exact = load_decoder(plain, "cpu", torch.float32, quantization)
    found = load_decoder(path, "cuda", torch.bfloat16, quantization)
    names: list[str] = []
    monkeypatch.setattr(gemm_kernel, "compile_kernel", lambda name: (names.append(name), compile_kernel(name))[1])
    most = 128 if scheme in ("awq", "gptq") else 64
    for rows in (3, 6, 29, 33, most):
        names.clear()
        assert error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2
        of_packed = ["gemm_hi_lo" in name or "gemm_int4" in name for name in names]
        assert sum(of_packed) >= 8 and (of_packed[-1] == (quantization == "fp8"))
