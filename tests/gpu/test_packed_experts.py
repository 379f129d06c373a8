# SPDX-License-Identifier: Apache-2.0
"""Experts in 4 bits and in blocks of FP8 on a GPU: GEMMs of each format at their edges, and whole small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.formats.experts import PackedExperts
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.mxfp4 import Mxfp4Matrix
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.cpu import moe as cpu_moe
from blink.kernels.gpu.device import has_clusters
from blink.models.decoder import Decoder
from blink.models.layer_weights import MoeWeights
from model_driver import compute_decoded_logits, load_decoder
from model_families import MXFP4, save_model
from quantized_checkpoints import write_checkpoints

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import inverse_rms_of, normed
from test_decode_quantized import draw, error

from blink.kernels.gpu.moe import grouped as gpu_moe
from blink.kernels.gpu.moe.decode_grouped import Mixture, add_grouped_experts

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

FORMS = [FormatId.FP8, FormatId.INT4, FormatId.MXFP4]
# Columns that groups do not divide, where the format has such; results of which tiles get 16 and 32 at once.
HIDDEN = {FormatId.FP8: 272, FormatId.INT4: 384, FormatId.MXFP4: 352}
SIZE = {FormatId.FP8: 208, FormatId.INT4: 128, FormatId.MXFP4: 96}
LIMIT = 1e-2


def draw_matrix(form: FormatId, rows: int, columns: int, scale: float = 1.0) -> QuantizedMatrix | Mxfp4Matrix:
    if form is FormatId.MXFP4:
        exponents = torch.randint(119, 124, (rows, columns // 32), dtype=torch.uint8, device="cuda")
        return Mxfp4Matrix(torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda"), exponents)
    size = (rows, -(-columns // GROUP))
    scales = ((torch.rand(size, device="cuda") + 0.5) * scale * columns**-0.5 / 4).half().float()
    if form is FormatId.FP8:
        return QuantizedMatrix(torch.randn(rows, columns, device="cuda").to(FP8), 4 * scales)
    zeros = torch.randint(5, 12, size, dtype=torch.uint8, device="cuda")
    return QuantizedMatrix(torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda"), scales, zeros)


def draw_experts(form: FormatId, count: int, rows: int, columns: int, scale: float = 1.0) -> PackedExperts:
    packed = PackedExperts.allocate(form, (count, rows, columns)).to(torch.device("cuda"))
    for expert in range(count):
        packed.store(expert, slice(None), draw_matrix(form, rows, columns, scale))
    return packed


def check(form: FormatId, rows: int, top_k: int, *, shape: tuple[int, int, int], clipped: bool = False) -> None:
    """Compare with float32 on the dequantised experts; those that nobody chose hold what is no number."""
    count, hidden, size = shape
    gate_up, down = draw_experts(form, count, 2 * size, hidden), draw_experts(form, count, hidden, size)
    x, logits = draw(rows, hidden), draw(rows, count)
    biases = (draw(count, 2 * size), draw(count, hidden)) if clipped else None
    activation = "clipped_silu" if clipped else "silu"
    expected = cpu_moe.moe(
        x.float(),
        logits.float(),
        gate_up.dequantize(torch.float32),
        down.dequantize(torch.float32),
        top_k=top_k,
        renormalize=True,
        activation=activation,
        biases=None if biases is None else (biases[0].float(), biases[1].float()),
    )
    chosen = logits.float().topk(top_k).indices.unique()
    unused = [expert for expert in range(count) if expert not in chosen.tolist()]
    for part in (gate_up, down):
        part.groups[unused] = -1  # NaN in every format, or so large that the sum is
    padded = torch.cat([x, torch.full((3, hidden), torch.nan, device="cuda", dtype=x.dtype)])
    num_tokens = torch.tensor([rows], dtype=torch.int32, device="cuda")
    found = gpu_moe.moe(
        padded,
        torch.cat([logits, logits[:1].expand(3, -1)]),
        gate_up,
        down,
        num_tokens,
        top_k=top_k,
        renormalize=True,
        activation=activation,
        biases=biases,
    )
    assert error(found[:rows], expected) < LIMIT
    assert not found[rows:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "top_k"), [(1, 1), (1, 8), (3, 2), (17, 5), (64, 8), (300, 3)])
def test_products_equal_those_of_the_dequantised_experts(form: FormatId, rows: int, top_k: int) -> None:
    torch.manual_seed(1)
    check(form, rows, top_k, shape=(16, HIDDEN[form], SIZE[form]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 40, 700])
def test_so_do_those_of_large_experts_with_biases(form: FormatId, rows: int) -> None:
    """Tiles of each size, by how many rows an expert has; gpt-oss's width."""
    torch.manual_seed(2)
    columns = 2816 if form is FormatId.INT4 else 2880
    check(form, rows, 4, shape=(8, columns, 768), clipped=True)


def test_scales_of_any_size_are_kept() -> None:
    """Groups of a row may differ by all that a model's could."""
    torch.manual_seed(3)
    matrix = draw_matrix(FormatId.MXFP4, 64, 128)
    assert isinstance(matrix, Mxfp4Matrix)
    for shift in (-100, 100):
        rows = Mxfp4Matrix(matrix.codes, (matrix.exponents + shift).to(torch.uint8))
        experts = PackedExperts.allocate(FormatId.MXFP4, (2, 64, 128)).to(torch.device("cuda"))
        experts.store(0, slice(None), rows)
        x, zeros = draw(5, 128), torch.zeros(5, 2, device="cuda", dtype=torch.bfloat16)
        routes = gpu_moe.route(zeros, torch.tensor([5], dtype=torch.int32, device="cuda"), 1)
        found = torch.empty(5, 64, device="cuda", dtype=torch.bfloat16)
        gpu_moe.multiply_grouped(x, experts, routes, found, pairs_per_row=1, activation=None)
        expected = x.double() @ matrix.dequantize(torch.float32).double().T * 2.0**shift
        assert float((found.double() - expected).norm() / expected.norm()) < LIMIT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_experts_between_two_norms_equal_the_dequantised(form: FormatId, rows: int) -> None:
    torch.manual_seed(4)
    count, hidden, size, top_k = 32, 512, 256, 4
    gate_up, down = draw_experts(form, count, 2 * size, hidden), draw_experts(form, count, hidden, size)
    residual, norm, next_norm, logits = draw(rows, hidden), draw(hidden), draw(hidden), draw(rows, count)
    dequantised = [part.dequantize(torch.float32) for part in (gate_up, down)]
    added = cpu_moe.moe(normed(residual, norm), logits.float(), *dequantised, top_k=top_k, renormalize=True)
    before = residual.float().clone()
    num_tokens = torch.tensor([rows], dtype=torch.int32, device="cuda")
    add_grouped_experts(
        residual, residual * norm, inverse_rms_of(residual), logits, Mixture(gate_up, down, top_k, renormalize=True),
        num_tokens, next_norm, permuted=False,
    )  # fmt: skip
    rounding = (residual.float() * 2**-9).norm() / added.norm()
    assert float((residual.float() - before - added).norm() / added.norm()) < 2e-2 + float(rounding)


def row_error(found: Tensor, expected: Tensor) -> float:
    """Return the median over rows: one whose router stands between two experts may choose another."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


def assert_packed(decoder: Decoder) -> None:
    for layer in decoder.layers:
        assert isinstance(layer.mlp, MoeWeights)
        assert isinstance(layer.mlp.gate_up, PackedExperts) and isinstance(layer.mlp.down, PackedExperts)


@pytest.mark.parametrize("scheme", ["fp8-block", "awq", "gptq", "packed"])
def test_models_with_experts_give_the_logits_of_their_dequantised_weights(tmp_path: Path, scheme: str) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    path, plain = write_checkpoints(tmp_path, scheme, **experts)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    assert_packed(found)
    for rows in (1, 3, 6, 29, 70):
        assert row_error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2


def test_gpt_oss_as_published_gives_the_logits_of_its_dequantised_weights(tmp_path: Path) -> None:
    path, plain = tmp_path / "mxfp4", tmp_path / "plain"
    model = save_model(MXFP4, path)  # rounded, as the files are
    model.save_pretrained(plain)
    exact, found = (load_decoder(place, "cuda", torch.bfloat16) for place in (plain, path))
    assert_packed(found)
    assert found.num_weight_bytes < 0.7 * exact.num_weight_bytes  # columns are filled up
    for rows in (1, 3, 29, 70):
        assert row_error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2
