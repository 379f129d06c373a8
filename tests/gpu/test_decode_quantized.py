# SPDX-License-Identifier: Apache-2.0
"""Decoding rows' kernels with weights of 8 and 4 bits against the dequantised weights, and whole small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from activation_hi_lo import split
from blink import LLM, SamplingParams
from blink.formats.experts import Fp8Experts, experts_of
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.cpu import moe as cpu_moe
from blink.kernels.cpu.activation import activate
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.gpu.device import has_clusters, has_warpgroups
from blink.models.layer_weights import DenseWeights, MoeWeights
from blink.plan.execution_plan import NormStyle
from blink.runner.matmul import linear
from model_driver import compute_decoded_logits, load_decoder
from quantized_checkpoints import SCHEMES, write_checkpoints

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import inverse_rms_of

from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemm_kernel, gemv, gemv_quantized, quantized, tile_configs
from blink.kernels.gpu.launch import compile_kernel
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe import grouped_gemm
from blink.kernels.gpu.moe.decode_grouped import Mixture as GroupedMixture
from blink.kernels.gpu.moe.decode_grouped import add_grouped_experts
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

EPS = 1e-5
KINDS = ["rows", "groups", "int4"]


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def draw_weight(kind: str, n: int, k: int) -> tuple[PackedWeight, Tensor]:
    """Return a packed weight and what it stands for, in float32."""
    sizes = (n, 1 if kind == "rows" else k // GROUP)
    scales = ((torch.rand(sizes, device="cuda") + 0.5) * k**-0.5).to(torch.float16).float()
    if kind == "int4":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        matrix = QuantizedMatrix(codes, scales / 4, torch.randint(0, 17, sizes, dtype=torch.uint8, device="cuda"))
    else:
        matrix = QuantizedMatrix((torch.randn(n, k, device="cuda") / 2**0.5).to(FP8), scales)
    return pack([matrix]), matrix.dequantize(torch.float32)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_torch(x.float(), weight.float(), EPS)


def check_few(kind: str, rows: int, n: int, k: int) -> None:
    x, norm_weight, bias, residual = draw(rows, k), draw(k), draw(n), draw(rows, n)
    weight, plain = draw_weight(kind, n, k)
    expected = functional.linear(normed(x, norm_weight), plain, bias.float())
    assert error(gemv.normed_linear(x, norm_weight, EPS, weight, bias), expected) < 1e-2
    added = residual.float() + functional.linear(x.float(), plain)
    gemv.add_linear(x, weight, residual)
    assert error(residual, added) < 1e-2
    weight, plain = draw_weight(kind, 2 * n, k)
    expected = activate(functional.linear(normed(x, norm_weight), plain))
    assert error(gemv.gated_linear(x, norm_weight, EPS, weight), expected) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 256), (1, 1000, 4096), (2, 200, 14336), (3, 40, 2048)])
def test_products_of_few_rows_equal_those_of_the_dequantised_weight(kind: str, rows: int, n: int, k: int) -> None:
    torch.manual_seed(1)
    check_few(kind, rows, n, k)


@pytest.mark.parametrize("kind", ["rows", "groups"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_width_of_seventeen_times_a_power_of_two_takes_seventeen_warps(kind: str, rows: int) -> None:
    torch.manual_seed(3)
    check_few(kind, rows, 136, 17408)


@pytest.mark.parametrize("kind", ["rows", "int4"])
@pytest.mark.parametrize(
    "config", [(2, 2, 2, 16, 8, 2), (1, 4, 4, 32, 4, 3), (4, 1, 1, 16, 8, 2), (2, 2, 4, 8, 4, 2)], ids=str
)
def test_any_split_of_few_rows_gives_the_same_products(
    kind: str, config: tuple[int, int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    chosen = gemv_quantized.QuantizedGemvConfig(*config)
    monkeypatch.setattr(gemv_quantized, "choose_config", lambda _: chosen)
    check_few(kind, 2, 100, 4096)


@pytest.mark.parametrize(("rows", "n", "k"), [(4, 100, 14336), (8, 72, 4096), (7, 1000, 512)])
def test_products_of_few_rows_with_4_bits_take_up_to_8(rows: int, n: int, k: int) -> None:
    torch.manual_seed(2)
    check_few("int4", rows, n, k)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_of_few_rows_what_is_not_finite_stays_so_in_its_row_alone(value: float) -> None:
    torch.manual_seed(8)
    x = draw(2, 1024)
    weight, _ = draw_weight("int4", 128, 1024)
    expected, found = torch.zeros(2, 2, 128, dtype=torch.bfloat16, device="cuda")
    gemv.add_linear(x, weight, expected)
    x[1, 300] = value
    gemv.add_linear(x, weight, found)
    assert not found[1].isfinite().any()
    assert torch.equal(found[0], expected[0])


def norm_of(x: Tensor, weight: Tensor) -> gemm.NormInput:
    square_sums = torch.full((1, tile_configs.bucket_rows(x.shape[0])), torch.nan, device="cuda")
    square_sums[:, : x.shape[0]] = x.float().square().sum(1)
    return gemm.NormInput((x.float() * weight.float()).to(torch.bfloat16), square_sums)


groups_only = pytest.mark.skipif(not has_clusters() or not has_warpgroups(), reason="needs Hopper")


@pytest.mark.parametrize(("kind", "tolerance"), [("rows", 5e-2), ("groups", 1e-2), ("int4", 1e-2)])
@pytest.mark.parametrize("rows", [3, 64, 70, 257, 1500])
def test_prompts_are_multiplied_within_their_rounding(kind: str, tolerance: float, rows: int) -> None:
    """With a scale for each weight row, many rows are rounded to FP8 as well."""
    torch.manual_seed(5)
    x = draw(rows, 1024)
    weight, plain = draw_weight(kind, 384, 1024)
    assert error(linear(x, weight), functional.linear(x.float(), plain)) < tolerance


@groups_only
@pytest.mark.parametrize("rows", [80, 256, 2048])
def test_many_rows_are_rounded_by_groups_where_weights_have_groups(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(quantized, "dequantize")
    torch.manual_seed(5)
    weight, plain = draw_weight("groups", 384, 1024)
    for scale in (1e-3, 1.0, 1e3):
        x = draw(rows, 1024, scale=scale)
        x[rows // 2] = 0
        found = linear(x, weight)
        assert error(found, functional.linear(x.float(), plain)) < 5e-2
        assert not found[rows // 2].any()


@groups_only
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_models_give_the_logits_of_their_dequantised_weights(tmp_path: Path, scheme: str) -> None:
    path, plain = write_checkpoints(tmp_path, scheme)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    has_kernels = "-32" not in scheme and "-64" not in scheme  # not for such groups
    assert isinstance(found.layers[0].qkv, PackedWeight) == has_kernels
    assert isinstance(found.lm_head, PackedWeight) == scheme.endswith("-head")
    for rows in (1, 3, 6, 29, 33):
        assert error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2


@groups_only
def test_an_output_layer_in_fp8_follows_layers_of_4_bits(tmp_path: Path) -> None:
    path, plain = write_checkpoints(tmp_path, "packed-fp8-head", vocab_size=1024)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    layer = found.layers[0]
    assert isinstance(layer.mlp, DenseWeights)
    for weight in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(weight, PackedWeight) and weight.format is FormatId.INT4
    assert isinstance(found.lm_head, PackedWeight) and found.lm_head.format is FormatId.FP8
    for rows in (1, 3, 6, 29):
        assert plan_of(found, rows).norms is not NormStyle.KERNEL  # or other kernels would be tested
        assert error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2


@groups_only
@pytest.mark.parametrize("plain_layers", [[0], [1], [0, 2]], ids=str)
@pytest.mark.parametrize("scheme", ["fp8-channel", "packed", "packed-fp8-head"])
def test_layers_in_16_bits_stand_beside_packed_ones(tmp_path: Path, scheme: str, plain_layers: list[int]) -> None:
    path, plain = write_checkpoints(tmp_path, scheme, plain_layers, num_hidden_layers=3)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    for index, layer in enumerate(found.layers):
        assert isinstance(layer.qkv, PackedWeight) == (index not in plain_layers)
    for rows in (1, 2, 3, 8, 16, 20, 24, 29, 33, 48, 64, 96):
        assert error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 8e-2


@groups_only
@pytest.mark.parametrize("max_num_seqs", [16, 24, 48, 64])
def test_a_model_whose_first_layer_is_in_16_bits_boots_and_serves(tmp_path: Path, max_num_seqs: int) -> None:
    path, _ = write_checkpoints(tmp_path, "fp8-channel", [0], num_hidden_layers=3)
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": 128, "num_gpu_blocks_override": 1024}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[3 + index % 100, 5, 7] for index in range(max_num_seqs)]
    with LLM(str(path), device="cuda", skip_tokenizer_init=True, **sizes) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [len(each.outputs[0].token_ids) for each in found] == [8] * max_num_seqs


@groups_only
def test_weights_rounded_when_loaded_are_packed(tmp_path: Path) -> None:
    _, plain = write_checkpoints(tmp_path, "fp8-channel")
    exact = load_decoder(plain, "cpu", torch.float32, quantization="fp8")
    found = load_decoder(plain, "cuda", torch.bfloat16, quantization="fp8")
    assert isinstance(found.lm_head, PackedWeight)
    assert error(compute_decoded_logits(found, 2), compute_decoded_logits(exact, 2)) < 5e-2


class Mixture:
    """One layer's experts in FP8, and rows to run them on."""

    def __init__(self, rows: int, shape: tuple[int, int, int, int]) -> None:
        torch.manual_seed(11)
        num_experts, self.top_k, hidden, size = shape
        self.residual, self.norm, self.next_norm = draw(rows, hidden), draw(hidden), draw(hidden)
        self.logits = draw(rows, num_experts)
        self.gate_up = draw_experts(num_experts, 2 * size, hidden)
        self.down = draw_experts(num_experts, hidden, size, scale=8)  # outweighs the residual's rounding
        self.context_lens = torch.ones(rows, dtype=torch.int32, device="cuda")

    def added(self) -> Tensor:
        """Return what the experts add, in float32."""
        x, gate_up, down = (
            normed(self.residual, self.norm),
            self.gate_up.dequantize(torch.float32),
            self.down.dequantize(torch.float32),
        )
        logits = self.logits.float()
        return cpu_moe.moe(x, logits, gate_up, down, top_k=self.top_k, renormalize=True)


def draw_experts(count: int, rows: int, columns: int, scale: float = 1.0) -> Fp8Experts:
    values = torch.randn(count, rows, columns, device="cuda").to(FP8)
    return Fp8Experts(values, (torch.rand(count, rows, device="cuda") + 0.5) * scale * columns**-0.5)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(128, 8, 256, 128), (64, 6, 2048, 768)], ids=str)
def test_experts_of_few_rows_equal_those_of_the_dequantised_weights(
    rows: int, shape: tuple[int, int, int, int]
) -> None:
    mixture = Mixture(rows, shape)
    routes = moe.Routes(mixture.logits, mixture.context_lens, mixture.top_k, True)
    residual, added = mixture.residual.clone(), mixture.added()
    gated = moe.gate_experts(residual, mixture.norm, EPS, mixture.gate_up, routes)
    following = moe.down_normed_experts(gated, mixture.down, routes, residual, mixture.next_norm)
    assert float((residual.float() - mixture.residual.float() - added).norm() / added.norm()) < 1e-2
    assert torch.equal(following.x, residual * mixture.next_norm)


def add_experts(mixture: Mixture, residual: Tensor, *, hi_lo: FormatId | None = None) -> gemm.NormInput:
    experts = experts_of(mixture.gate_up, mixture.down, mixture.top_k)
    assert grouped_gemm.refuses(experts, len(residual)) is None
    return add_grouped_experts(
        residual,
        residual * mixture.norm,
        inverse_rms_of(residual),
        mixture.logits,
        GroupedMixture(mixture.gate_up, mixture.down, mixture.top_k, renormalize=True),
        torch.tensor([len(residual)], dtype=torch.int32, device="cuda"),
        mixture.next_norm,
        permuted=True,
        hi_lo=hi_lo,
    )


@groups_only
@pytest.mark.parametrize("rows", [5, 33])
def test_experts_of_many_rows_equal_those_of_the_dequantised_weights(rows: int) -> None:
    mixture = Mixture(rows, (128, 8, 512, 256))
    residual, added = mixture.residual.clone(), mixture.added()
    add_experts(mixture, residual)
    assert float((residual.float() - mixture.residual.float() - added).norm() / added.norm()) < 2e-2


@groups_only
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("format", [FormatId.FP8, FormatId.INT4])
def test_experts_write_the_next_norm_as_planes(rows: int, format: FormatId) -> None:
    mixture = Mixture(rows, (128, 8, 512, 256))
    residual, twin = mixture.residual.clone(), mixture.residual.clone()
    plain, found = add_experts(mixture, residual), add_experts(mixture, twin, hi_lo=format)
    assert torch.equal(residual, twin) and torch.equal(plain.square_sums[:, :rows], found.square_sums[:, :rows])
    assert torch.equal(found.x, split(plain.x, format))
    if rows > moe.MAX_ROWS:
        return
    routes = moe.Routes(mixture.logits, mixture.context_lens, mixture.top_k, True)
    gated = moe.gate_experts(residual, mixture.norm, EPS, mixture.gate_up, routes)
    found = moe.down_normed_experts(gated, mixture.down, routes, residual, mixture.next_norm, hi_lo=format)
    assert torch.equal(found.x, split(residual * mixture.next_norm, format))


@groups_only
def test_experts_of_a_model_are_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    }
    path, plain = write_checkpoints(tmp_path, "fp8-channel", **experts)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    mlp = found.layers[0].mlp
    assert isinstance(mlp, MoeWeights) and isinstance(mlp.down, Fp8Experts)
    names: list[str] = []
    monkeypatch.setattr(gemm_kernel, "compile_kernel", lambda name: (names.append(name), compile_kernel(name))[1])
    for rows in (1, 6, 33):
        names.clear()
        assert error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 0.1
        # The prompts' GEMMs have neither a norm nor a residual.
        decoding = [name for name in names if "gemm_hi_lo" in name and "kStore, false" not in name]
        assert len(decoding) == 2 * len(found.layers)
