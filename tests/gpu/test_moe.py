# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts kernels against the plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from activation_hi_lo import join, split
from blink.formats.experts import Fp8Experts, PackedExperts
from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.mxfp4 import Mxfp4Matrix
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.cpu import moe as cpu
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.operands import Activation

gpu_moe = pytest.importorskip("blink.kernels.gpu.moe.grouped")
routing = pytest.importorskip("blink.kernels.gpu.moe.routing")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Make distinct logits per token, since the order of equal ones is not defined."""
    generator = torch.Generator().manual_seed(6)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)
    return ((order - num_experts / 2) / 16).to(dtype)


def to_fp8(weight: Tensor) -> Fp8Experts:
    parts = [quantize_fp8(expert.float()) for expert in weight]
    return Fp8Experts(torch.stack([part.values for part in parts]), torch.stack([part.scales[:, 0] for part in parts]))


def _shape(weight: Tensor) -> tuple[int, int, int]:
    experts, rows, columns = weight.shape
    return experts, rows, columns


def to_fp8_blocks(weight: Tensor) -> PackedExperts:
    packed = PackedExperts.allocate(FormatId.FP8, _shape(weight))
    for index, expert in enumerate(weight):
        rounded = quantize_fp8(expert.float())
        spread = torch.rand(len(expert), -(-weight.shape[2] // GROUP)) + 0.5
        packed.store(index, slice(None), QuantizedMatrix(rounded.values, rounded.scales * spread))
    return packed


def to_int4(weight: Tensor) -> PackedExperts:
    packed = PackedExperts.allocate(FormatId.INT4, _shape(weight))
    for index, expert in enumerate(weight):
        size = (len(expert), weight.shape[2] // GROUP)
        scales = (expert.float().view(*size, GROUP).abs().amax(-1) / 24).half().float()
        zeros = torch.randint(0, 17, size, dtype=torch.uint8)
        codes = torch.randint(0, 16, expert.shape, dtype=torch.uint8)
        packed.store(index, slice(None), QuantizedMatrix(codes, scales, zeros))
    return packed


def to_mxfp4(weight: Tensor) -> PackedExperts:
    packed = PackedExperts.allocate(FormatId.MXFP4, _shape(weight))
    for index, expert in enumerate(weight):
        codes = torch.randint(0, 16, expert.shape, dtype=torch.uint8)
        exponents = torch.randint(117, 124, (len(expert), expert.shape[1] // 32), dtype=torch.uint8)
        packed.store(index, slice(None), Mxfp4Matrix(codes, exponents))
    return packed


QUANTIZERS = {"fp8": to_fp8, "fp8-blocks": to_fp8_blocks, "int4": to_int4, "mxfp4": to_mxfp4}


def assert_equals_reference(
    num_tokens: int,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    top_k: int = 3,
    dtype: torch.dtype = torch.float32,
    num_padding: int = 0,
    renormalize: bool = True,
    router_logits: Tensor | None = None,
    activation: Activation = "silu",
    has_biases: bool = False,
    kind: str = "",
) -> None:
    """Compare with the reference in float32; padding holds NaN, and the result there must be zero."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16")
    num_experts, hidden, size = shape
    generator = torch.Generator().manual_seed(7)
    x, gate_up, down = (
        torch.randn(dims, generator=generator) * dims[-1] ** -0.5
        for dims in ((num_tokens, hidden), (num_experts, 2 * size, hidden), (num_experts, hidden, size))
    )
    x, gate_up, down = (x * hidden**0.5).to(dtype), gate_up.to(dtype), down.to(dtype)
    logits = make_logits(num_tokens, num_experts, dtype) if router_logits is None else router_logits
    weights = [QUANTIZERS[kind](part) if kind else part for part in (gate_up, down)]
    gate_up, down = (part if isinstance(part, Tensor) else part.dequantize(torch.float32) for part in weights)
    inner_bias, bias = (torch.randn(part.shape[:2], generator=generator).to(dtype) for part in (gate_up, down))
    wide = (inner_bias.float(), bias.float()) if has_biases else None
    expected = cpu.moe(
        x.float(), logits, gate_up.float(), down.float(),
        top_k=top_k, renormalize=renormalize, activation=activation, biases=wide,
    )  # fmt: skip
    padded = [
        torch.cat((part, torch.full((num_padding, part.shape[1]), torch.nan, dtype=dtype))) for part in (x, logits)
    ]
    count = torch.tensor([num_tokens], dtype=torch.int32)
    inputs = [part.to(device) for part in (*padded, *weights, count)]
    biases = (inner_bias.to(device), bias.to(device)) if has_biases else None
    found = gpu_moe.moe(*inputs, top_k=top_k, renormalize=renormalize, activation=activation, biases=biases).cpu()
    torch.testing.assert_close(found[:num_tokens].float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not found[num_tokens:].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 150])
def test_any_number_of_tokens_equals_the_reference(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_equals_reference(num_tokens, (8, 64, 48), device, dtype=dtype)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 6])
def test_each_number_of_choices_equals_the_reference(top_k: int, renormalize: bool, device: torch.device) -> None:
    assert_equals_reference(20, (6, 32, 16), device, top_k=top_k, renormalize=renormalize)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_biases_and_the_clipped_activation_equal_the_reference(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert_equals_reference(num_tokens, (4, 64, 48), device, dtype=dtype, activation="clipped_silu", has_biases=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_experts_in_fp8_equal_the_reference(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_equals_reference(num_tokens, (4, 64, 48), device, dtype=dtype, kind="fp8")


PACKED_SHAPES = {"fp8-blocks": (3, 144, 32), "int4": (3, 128, 128), "mxfp4": (3, 160, 32)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PACKED_SHAPES)
def test_experts_in_4_bits_and_blocks_equal_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Depths that groups do not divide where the format has such; more of them in test_packed_experts.py."""
    assert_equals_reference(3, PACKED_SHAPES[kind], device, dtype=dtype, kind=kind, num_padding=2, top_k=2)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 140])
def test_some_of_the_experts_add_their_part(num_tokens: int, renormalize: bool, device: torch.device) -> None:
    """As a rank has them; the router chooses among all."""
    generator = torch.Generator().manual_seed(9)
    shapes = (num_tokens, 32), (5, 32, 32), (5, 32, 16)
    x, gate_up, down = (torch.randn(shape, generator=generator) / 4 for shape in shapes)
    logits, top_k = make_logits(num_tokens, 5, torch.float32), 3
    count = torch.tensor([num_tokens], dtype=torch.int32)
    for own in (slice(0, 2), slice(2, 5)):
        first, parts = own.start, (x, logits, gate_up[own], down[own])
        expected = cpu.moe(*parts, top_k=top_k, renormalize=renormalize, first=first)
        inputs = [part.to(device) for part in (*parts, count)]
        found = gpu_moe.moe(*inputs, top_k=top_k, renormalize=renormalize, first=first)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_padding_is_not_routed_and_becomes_zero(device: torch.device) -> None:
    assert_equals_reference(5, (8, 32, 32), device, num_padding=60)


def test_all_tokens_may_choose_the_same_experts(device: torch.device) -> None:
    logits = torch.arange(16.0).expand(140, -1).contiguous()
    assert_equals_reference(140, (16, 32, 32), device, router_logits=logits)


def test_many_pairs_per_expert_equal_the_reference(device: torch.device) -> None:
    assert_equals_reference(130, (2, 64, 128), device, top_k=2, dtype=torch.bfloat16)


def test_of_equal_router_logits_the_first_experts_are_chosen(device: torch.device) -> None:
    routes = gpu_moe.route(
        torch.zeros(3, 5, device=device), torch.tensor([3], dtype=torch.int32, device=device), top_k=2
    )
    assert routes.counts.tolist() == [3, 3, 0, 0, 0]
    assert routes.pairs[:2].tolist() == [[0, 2, 4], [1, 3, 5]]
    torch.testing.assert_close(routes.weights.cpu(), torch.full((6,), 0.2))


@pytest.mark.parametrize("num_nan", [5, 3])
def test_a_row_with_nan_chooses_as_many_experts_as_others(num_nan: int, device: torch.device) -> None:
    logits = make_logits(4, 5, torch.float32).to(device)
    logits[1, :num_nan] = torch.nan
    routes = gpu_moe.route(logits, torch.tensor([4], dtype=torch.int32, device=device), top_k=2)
    chosen = [routes.pairs[expert, : int(routes.counts[expert])].tolist() for expert in range(5)]
    assert sorted(pair for pairs in chosen for pair in pairs) == list(range(8))
    assert routes.weights.view(4, 2).isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (12, 8)])
def test_many_tokens_are_routed_as_few_are(
    num_experts: int, top_k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits, a row of NaN, one with some, infinite ones, and padding are among them."""
    logits = make_logits(300, num_experts, torch.float32).mul(4).round().to(device)
    logits[7], logits[40, 1:3], logits[41], logits[42, 2] = torch.nan, torch.nan, -torch.inf, torch.inf
    num_tokens = torch.tensor([290], dtype=torch.int32, device=device)
    many = gpu_moe.route(logits, num_tokens, top_k)
    monkeypatch.setattr(routing, "_FEW_TOKENS", 300)
    few = gpu_moe.route(logits, num_tokens, top_k)
    assert many.counts.tolist() == few.counts.tolist()
    assert sum(many.counts.tolist()) == 290 * top_k
    for expert, count in enumerate(few.counts.tolist()):
        assert torch.equal(many.pairs[expert, :count], few.pairs[expert, :count])
    written = 290 * top_k
    torch.testing.assert_close(many.weights[:written], few.weights[:written], equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_between_two_norms_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16")
    check_experts_between_norms((544, 32), dtype, device)


@pytest.mark.parametrize("format", [FormatId.FP8, FormatId.INT4])
def test_the_norm_behind_experts_is_written_as_planes(format: FormatId, device: torch.device) -> None:
    check_experts_between_norms((640, 32), torch.float32, device, hi_lo=format)


def check_experts_between_norms(
    sizes: tuple[int, int], dtype: torch.dtype, device: torch.device, *, hi_lo: FormatId | None = None
) -> None:
    """sizes: hidden and the experts'."""
    pytest.importorskip("cuda.core")
    from blink.kernels.gpu.moe.decode_grouped import Mixture, add_grouped_experts

    num_tokens, num_experts, (hidden, size), padding, eps = 9, 4, sizes, 3, 1e-5
    generator = torch.Generator().manual_seed(8)
    rows = num_tokens + padding
    residual, gate_up, down, norm, next_norm = (
        (torch.randn(dims, generator=generator) * scale).to(dtype)
        for dims, scale in (
            ((rows, hidden), 1.0),
            ((num_experts, 2 * size, hidden), hidden**-0.5),
            ((num_experts, hidden, size), 8 * size**-0.5),
            ((hidden,), 1.0),
            ((hidden,), 1.0),
        )
    )
    logits = make_logits(rows, num_experts, dtype)
    x = rms_norm_torch(residual.float(), norm.float(), eps)
    expected = residual.float().clone()
    expected[:num_tokens] += cpu.moe(
        x[:num_tokens], logits[:num_tokens], gate_up.float(), down.float(), top_k=3, renormalize=True
    )
    inverse_rms = (residual.float().square().mean(-1) + eps).rsqrt()
    residual = residual.to(device)
    found = add_grouped_experts(
        residual,
        residual * norm.to(device),
        inverse_rms.to(device),
        logits.to(device),
        Mixture(gate_up.to(device), down.to(device), 3, renormalize=True),
        torch.tensor([num_tokens], dtype=torch.int32, device=device),
        next_norm.to(device),
        permuted=False,
        hi_lo=hi_lo,
    )
    tolerance = TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(residual.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(residual[num_tokens:].float().cpu(), expected[num_tokens:])
    next_x = (residual * next_norm.to(device)).float()
    tolerance = 0 if hi_lo else 1e-2
    found_x, next_x = (join(found.x, hi_lo), join(split(next_x))) if hi_lo else (found.x.float(), next_x)
    torch.testing.assert_close(found_x, next_x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.square_sums.sum(0)[:rows], residual.float().square().sum(-1), rtol=1e-4, atol=1e-4)
