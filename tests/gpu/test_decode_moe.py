# SPDX-License-Identifier: Apache-2.0
"""The experts of decoding rows against plain references, over shapes and edges; what overlaps must not race."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from activation_hi_lo import join
from blink.formats.base import plain
from blink.kernels.batch import Header
from blink.kernels.cpu import moe as cpu
from blink.kernels.cpu.activation import activate
from blink.kernels.gpu.device import has_clusters
from blink.kernels.layer_cache import LayerCache
from blink.kernels.moe import moe as moe_of
from blink.kernels.operands import HeadNorm
from blink.kernels.rms_norm import rms_norm
from blink.kernels.rotary import make_rotary_table
from blink.models.decoder import Decoder
from blink.models.layer_weights import LayerWeights, MoeWeights
from blink.models.mlps import MoeMlp, Router
from blink.models.rope import Rope
from blink.plan.execution_plan import NormStyle
from blink.runner.run import Runner
from model_specs import clone_cache, fill_cache, make_attention, make_spec, stack_cache

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import (
    EPS,
    count_pdl_edges,
    draw,
    error,
    inverse_rms_of,
    launch_device_graph,
    make_batch,
    norm_of,
    normed,
    on_gpu,
    produce_late,
)
from test_moe import to_fp8

from blink.formats.experts import ExpertWeights, Fp8Experts, experts_of
from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm.gemv import add_linear, normed_linear
from blink.kernels.gpu.launch import launch
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe import grouped_gemm, permuted_experts
from blink.kernels.gpu.moe.decode_grouped import Mixture as GroupedMixture
from blink.kernels.gpu.moe.decode_grouped import add_grouped_experts
from blink.kernels.gpu.moe.grouped_gemm import GroupedGemmConfig
from blink.kernels.gpu.moe.permutation import permute
from blink.plan.site import Bucket
from blink.runner.gpu_device import DECODE_ATTENTION, GATHERED, PERMUTED
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with PDL launches")


class Mixture:
    """The weights of one layer's experts, and rows to run them on."""

    def __init__(self, rows: int, num_experts: int, top_k: int, hidden: int, size: int) -> None:
        torch.manual_seed(11)
        self.top_k, self.renormalize = top_k, True
        self.residual, self.norm = draw(rows, hidden), draw(hidden)
        self.router = draw(num_experts, hidden, scale=hidden**-0.5)
        self.gate_up = draw(num_experts, 2 * size, hidden, scale=hidden**-0.5)
        self.down = draw(num_experts, hidden, size, scale=8 * size**-0.5)  # outweighs the residual's rounding
        self.context_lens = torch.ones(rows, dtype=torch.int32, device="cuda")

    def route(self, residual: Tensor) -> moe.Routes:
        logits = normed_linear(residual, self.norm, EPS, self.router)
        return moe.Routes(logits, self.context_lens, self.top_k, self.renormalize)

    def add_to(self, residual: Tensor) -> Tensor:
        routes = self.route(residual)
        moe.down_experts(moe.gate_experts(residual, self.norm, EPS, self.gate_up, routes), self.down, routes, residual)
        return residual

    def run(self) -> Tensor:
        return self.add_to(self.residual.clone())

    def reference(self) -> Tensor:
        """Choose by the kernels' own logits, of equals the first, and sum in float32."""
        logits = normed_linear(self.residual, self.norm, EPS, self.router).float()
        weights, experts = (part[:, : self.top_k] for part in logits.softmax(-1).sort(descending=True, stable=True))
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        x, result = normed(self.residual, self.norm), self.residual.float()
        for row in (self.context_lens > 0).nonzero().flatten().tolist():
            for weight, expert in zip(weights[row], experts[row].tolist(), strict=True):
                inner = activate(functional.linear(x[row : row + 1], self.gate_up[expert].float()))
                result[row] += weight * functional.linear(inner, self.down[expert].float())[0]
        return result


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("shape", [(128, 8, 256, 96), (32, 3, 576, 128), (64, 6, 2048, 768)], ids=str)
def test_experts_equal_the_reference(rows: int, shape: tuple[int, int, int, int]) -> None:
    mixture = Mixture(rows, *shape)
    assert moe.refuses(experts_of(mixture.gate_up, mixture.down, mixture.top_k), rows) is None
    expected, found = mixture.reference(), mixture.run()
    added = expected - mixture.residual.float()
    assert float((found.float() - expected).norm() / added.norm()) < 1e-2
    assert torch.equal(mixture.run(), found)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 32])
def test_each_number_of_choices_equals_the_reference(rows: int, top_k: int, renormalize: bool) -> None:
    mixture = Mixture(rows, 32, top_k, 256, 64)
    mixture.renormalize = renormalize
    assert error(mixture.run(), mixture.reference()) < 1e-2


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_the_next_norm_comes_with_the_sums(rows: int) -> None:
    mixture = Mixture(rows, 128, 8, 256, 96)
    mixture.context_lens[rows // 2] = 0  # padding's norm is that of its residual
    expected, residual, next_norm = mixture.run(), mixture.residual.clone(), draw(256)
    routes = mixture.route(residual)
    gated = moe.gate_experts(residual, mixture.norm, EPS, mixture.gate_up, routes)
    normed = moe.down_normed_experts(gated, mixture.down, routes, residual, next_norm)
    assert torch.equal(residual, expected)
    assert torch.equal(normed.x, residual * next_norm)
    torch.testing.assert_close(normed.square_sums.sum(0)[:rows], residual.float().square().sum(-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "gate", [moe.MoeGateConfig(4, 4, 2, 1), moe.MoeGateConfig(8, 16, 3, 2), moe.MoeGateConfig(2, 8, 4, 3)], ids=str
)
@pytest.mark.parametrize(
    "down", [moe.MoeDownConfig(4, 8, 2), moe.MoeDownConfig(8, 32, 3), moe.MoeDownConfig(2, 16, 4)], ids=str
)
@pytest.mark.parametrize("rows", [1, 3])
def test_any_split_gives_the_same_sums(
    rows: int, gate: moe.MoeGateConfig, down: moe.MoeDownConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = Mixture(rows, 64, 6, 512, 256)
    monkeypatch.setattr(moe, "choose_gate_config", lambda *_, **__: gate)
    monkeypatch.setattr(moe, "choose_down_config", lambda *_, **__: down)
    assert error(mixture.run(), mixture.reference()) < 1e-2


def test_rows_may_choose_the_same_experts_and_get_the_same_sums() -> None:
    mixture = Mixture(8, 128, 8, 256, 96)
    alone = mixture.run()[:1]
    mixture.residual[:] = mixture.residual[:1].clone()
    together = mixture.run()
    assert error(together, mixture.reference()) < 1e-2
    assert torch.equal(together, alone.expand_as(together))


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    mixture = Mixture(4, 64, 5, 256, 64)
    mixture.router.zero_()
    mixture.gate_up[5:] = torch.nan
    found = mixture.run()
    assert found.isfinite().all()
    assert error(found, mixture.reference()) < 1e-2


def test_padding_keeps_its_residual_and_others_their_bits() -> None:
    mixture = Mixture(8, 128, 8, 256, 96)
    expected = mixture.run()
    assert not torch.equal(expected, mixture.residual)
    mixture.context_lens[2] = mixture.context_lens[7] = 0
    mixture.residual[2] = mixture.residual[7] = torch.nan
    found = mixture.run()
    assert found[[2, 7]].isnan().all()
    kept = [0, 1, 3, 4, 5, 6]
    assert torch.equal(found[kept], expected[kept])
    mixture.context_lens.zero_()
    mixture.residual = draw(8, 256)
    assert torch.equal(mixture.run(), mixture.residual)


def test_a_row_of_nan_spoils_no_other_row() -> None:
    mixture = Mixture(4, 128, 8, 256, 96)
    expected = mixture.run()
    mixture.residual[1] = torch.nan
    found = mixture.run()
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def draw_logits(rows: int, num_experts: int) -> Tensor:
    """Draw logits of which no two of a row are equal."""
    order = torch.rand(rows, num_experts, device="cuda").argsort(-1)
    return ((order - num_experts / 2) / 16).to(torch.bfloat16)


def in_float(weight: ExpertWeights) -> Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, Fp8Experts) else plain(weight).float()


def check_without_norms(logits: Tensor, gate_up: ExpertWeights, down: ExpertWeights, num_tokens: int) -> None:
    """Compare permuted_experts.moe with the plain reference."""
    x = draw(len(logits), down.shape[1])
    x[num_tokens:] = torch.nan
    assert grouped_gemm.refuses(experts_of(gate_up, down, 8), len(x)) is None
    limit = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    found = permuted_experts.moe(x, logits, (gate_up, down), limit, top_k=8, renormalize=True)
    expected = cpu.moe(
        x[:num_tokens].float(), logits[:num_tokens], in_float(gate_up), in_float(down), top_k=8, renormalize=True
    )
    assert error(found[:num_tokens], expected) < 1e-2
    assert not found[num_tokens:].any()


def check_grouped(rows: int, logits: Tensor, gate_up: ExpertWeights, down: ExpertWeights, num_tokens: int) -> None:
    """Compare add_grouped_experts with the plain reference, or where rows are too many for it what runs without it."""
    hidden, top_k = down.shape[1], 8
    if rows > gemm.MAX_ROWS:
        check_without_norms(logits, gate_up, down, num_tokens)
        return
    assert grouped_gemm.refuses(experts_of(gate_up, down, top_k), rows) is None
    residual, norm, next_norm = draw(rows, hidden), draw(hidden), draw(hidden)
    expected, x = residual.float().clone(), normed(residual, norm)
    expected[:num_tokens] += cpu.moe(
        x[:num_tokens], logits[:num_tokens], in_float(gate_up), in_float(down), top_k=top_k, renormalize=True
    )
    before = residual.float().clone()
    found = add_grouped_experts(
        residual,
        residual * norm,
        inverse_rms_of(residual),
        logits,
        GroupedMixture(gate_up, down, top_k, renormalize=True),
        torch.tensor([num_tokens], dtype=torch.int32, device="cuda"),
        next_norm,
        permuted=True,
    )
    assert float((residual.float() - expected).norm() / (expected - before).norm()) < 1e-2
    assert torch.equal(residual[num_tokens:].float(), before[num_tokens:])
    assert torch.equal(found.x, residual * next_norm)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        None,
        *(
            GroupedGemmConfig(*sizes)
            for sizes in ((8, 1, 1, 2), (8, 1, 2, 1), (8, 2, 1, 1), (16, 1, 1, 3), (16, 2, 1, 1))
        ),
        *(GroupedGemmConfig(*sizes) for sizes in ((32, 1, 1, 2), (32, 1, 2, 2), (32, 2, 1, 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rows", "num_tokens"), [(5, 5), (8, 7), (13, 13), (32, 30), (64, 64), (96, 96), (200, 190), (256, 256)]
)
def test_grouped_products_equal_the_reference_however_they_are_split(
    rows: int, num_tokens: int, config: GroupedGemmConfig | None, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    if config is not None:
        if config.tokens > grouped_gemm.count_places(rows):
            pytest.skip("an expert has fewer places")
        monkeypatch.setattr(grouped_gemm, "choose_config", lambda *_, **__: config)
    gate_up, down = draw(40, 2 * 256, 768, scale=768**-0.5), draw(40, 768, 256, scale=8 * 256**-0.5)
    logits = draw_logits(rows, 40)
    logits[:, 7] = 9  # an expert of all rows
    logits[: rows // 2, 39] = 8
    logits[:, 12] = -100  # of none
    if in_fp8:
        check_grouped(rows, logits, to_fp8(gate_up), to_fp8(down), num_tokens)
    else:
        check_grouped(rows, logits, gate_up, down, num_tokens)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("rows", [8, 64, 128, 256])
def test_grouped_products_of_a_large_model(rows: int, in_fp8: bool) -> None:
    torch.manual_seed(rows)
    gate_up, down = draw(128, 2 * 768, 2048, scale=2048**-0.5), draw(128, 2048, 768, scale=8 * 768**-0.5)
    logits = draw_logits(rows, 128)
    if in_fp8:
        check_grouped(rows, logits, to_fp8(gate_up), to_fp8(down), rows)
    else:
        check_grouped(rows, logits, gate_up, down, rows)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("idle", [0, 20])
@pytest.mark.parametrize(
    ("rows", "num_experts", "size"),
    [(8, 200, 256), (64, 64, 128), (64, 256, 128), (32, 100, 384), (3, 128, 768), (256, 100, 384), (256, 256, 128)],
    ids=[
        "one home each",
        "homes alone",
        "one home of two tiles",
        "two homes",
        "mostly guessed wrong",
        "of many rows",
        "fewer rows of more experts",
    ],
)
def test_grouped_products_guess_what_is_chosen(rows: int, num_experts: int, size: int, idle: int, in_fp8: bool) -> None:
    torch.manual_seed(rows)
    gate_up = draw(num_experts, 2 * size, 512, scale=512**-0.5)
    down = draw(num_experts, 512, size, scale=8 * size**-0.5)
    logits = draw_logits(rows, num_experts)
    logits[:, :idle] = -100  # experts of no row, whose blocks guess wrong
    logits[:, num_experts - 1] = 9
    if in_fp8:
        check_grouped(rows, logits, to_fp8(gate_up), to_fp8(down), rows)
    else:
        gate_up[:idle] = torch.nan
        check_grouped(rows, logits, gate_up, down, rows)


def test_a_row_of_nan_spoils_no_row_that_its_experts_treat_beside() -> None:
    torch.manual_seed(3)
    gate_up, down = draw(16, 2 * 128, 256, scale=256**-0.5), draw(16, 256, 128, scale=8 * 128**-0.5)
    logits, norm, residual = draw(9, 16), draw(256), draw(9, 256)
    mixture = GroupedMixture(gate_up, down, 8, renormalize=True)
    num_tokens = torch.tensor([9], dtype=torch.int32, device="cuda")
    assert grouped_gemm.refuses(experts_of(gate_up, down, 8), 9) is None

    def run(residual: Tensor) -> Tensor:
        x, inverse_rms = residual * norm, inverse_rms_of(residual)
        add_grouped_experts(residual, x, inverse_rms, logits, mixture, num_tokens, norm, permuted=True)
        return residual

    expected = run(residual.clone())
    residual[4] = torch.nan
    found = run(residual)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("hi_lo", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_tokens"), [(1, 1), (8, 7), (19, 19), (64, 50), (65, 65), (128, 120), (129, 129), (200, 0), (256, 250)]
)
@pytest.mark.parametrize("num_experts", [24, 128, 256])
def test_rows_lie_behind_one_another_by_their_experts(
    rows: int, num_tokens: int, num_experts: int, hi_lo: bool
) -> None:
    torch.manual_seed(rows)
    hidden, top_k = 640, 3
    x, logits = draw(rows, hidden), draw_logits(rows, num_experts)
    logits[:, 5] = 9  # is everybody's choice
    inverse_rms, limit = inverse_rms_of(x), torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    found, routes = permute(logits, x, inverse_rms, limit, top_k, hi_lo=hi_lo)
    expected = x.float() * inverse_rms[:, None]
    found = (join(found, None) if hi_lo else found).float().view(num_experts, -1, hidden)
    chances, experts = logits.float().softmax(-1).sort(descending=True, stable=True)
    torch.testing.assert_close(routes.weights.view(rows, top_k)[:num_tokens], chances[:num_tokens, :top_k])
    for expert in range(num_experts):
        tokens, ranks = (experts[:num_tokens, :top_k] == expert).nonzero().T
        count = int(routes.counts[expert])
        assert count == len(tokens) <= found.shape[1]
        assert routes.pairs[expert, :count].tolist() == (tokens * top_k + ranks).tolist()
        rtol = 2**-8 + (2**-7 if hi_lo else 0)  # bfloat16 has 8 bits, hi/lo FP8 have 6 of them
        torch.testing.assert_close(found[expert, :count], expected[tokens], rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("rows", [64, 200])
def test_rows_that_are_normalised_are_copied_as_they_are(rows: int) -> None:
    x, logits = draw(rows, 640), draw_logits(rows, 128)
    limit = torch.tensor([rows], dtype=torch.int32, device="cuda")
    found, routes = permute(logits, x, None, limit, 3, hi_lo=False)
    for expert, count in enumerate(routes.counts.tolist()):
        pairs = routes.pairs[expert, :count]
        assert torch.equal(found.view(128, -1, 640)[expert, :count], x[pairs // 3])


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("rows", "num_tokens"), [(1, 1), (64, 64), (128, 100), (256, 250)])
def test_experts_without_norms_equal_the_reference_and_padding_becomes_zero(
    rows: int, num_tokens: int, in_fp8: bool
) -> None:
    torch.manual_seed(rows)
    gate_up, down = draw(40, 2 * 256, 768, scale=768**-0.5), draw(40, 768, 256, scale=256**-0.5)
    logits = draw_logits(rows, 40)
    logits[num_tokens:] = torch.nan
    if in_fp8:
        check_without_norms(logits, to_fp8(gate_up), to_fp8(down), num_tokens)
    else:
        check_without_norms(logits, gate_up, down, num_tokens)


@pytest.mark.parametrize("rows", [3, 8, 33, 64, 100])
def test_the_routers_product_leaves_the_rates_of_the_norm(rows: int) -> None:
    x, norm, router = draw(rows, 512), draw(512), draw(128, 512)
    inverse_rms = torch.full((rows + 1,), 7.0, device="cuda")
    gemm.normed_linear(norm_of(x, norm), EPS, router, inverse_rms=inverse_rms[:rows])
    torch.testing.assert_close(inverse_rms[:rows], inverse_rms_of(x), rtol=1e-5, atol=0)
    assert float(inverse_rms[rows]) == 7


def test_rows_with_nan_among_their_logits_choose_as_many_experts_as_others() -> None:
    logits = draw_logits(3, 24)
    logits[1, ::2] = torch.nan
    limit = torch.tensor([3], dtype=torch.int32, device="cuda")
    _, routes = permute(logits, draw(3, 128), torch.ones(3, device="cuda"), limit, 4, hi_lo=False)
    chosen = [routes.pairs[expert, : int(routes.counts[expert])].tolist() for expert in range(24)]
    assert sorted(pair for pairs in chosen for pair in pairs) == list(range(12))
    assert routes.weights.view(3, 4).isnan().any(1).tolist() == [False, True, False]


class Chain:
    """Three small layers with experts over one residual, as a step runs them."""

    def __init__(self, rows: int) -> None:
        self.mixture = Mixture(rows, 128, 8, 1024, 256)
        batch, num_blocks = make_batch([39 * (row % 13 + 1) for row in range(rows)], 512)
        self.batch = on_gpu(batch)
        self.table = make_rotary_table(Rope(theta=1e4, rotary_dim=128).frequencies(), 512, "cuda")
        self.cache = LayerCache(draw(2, num_blocks, 16, 2, 128))
        self.qkv, self.output = draw(12 * 128, 1024, scale=0.03), draw(1024, 1024, scale=0.03)
        self.residual = self.mixture.residual.clone()

    def run(self) -> None:
        self.residual.copy_(self.mixture.residual)
        rows = len(self.residual)
        run = self.run_few if rows <= 2 else self.run_many if rows <= gemm.MAX_ROWS else self.run_most
        run(self.mixture, self.residual)

    def run_few(self, mixture: Mixture, residual: Tensor) -> None:
        for _ in range(3):
            qkv = normed_linear(residual, mixture.norm, EPS, self.qkv)
            add_linear(decode_attention(qkv, self.cache, self.batch, self.table), self.output, residual)
            mixture.add_to(residual)

    def run_many(self, mixture: Mixture, residual: Tensor) -> None:
        normed = gemm.add_linear(torch.zeros_like(residual), self.output, residual, mixture.norm)
        for _ in range(3):
            qkv = gemm.normed_linear(normed, EPS, self.qkv)
            attended = decode_attention(qkv, self.cache, self.batch, self.table)
            normed = gemm.add_linear(attended, self.output, residual, mixture.norm)
            inverse_rms = residual.new_empty(len(residual), dtype=torch.float32)
            logits = gemm.normed_linear(normed, EPS, mixture.router, inverse_rms=inverse_rms)
            if len(residual) <= moe.MAX_ROWS:
                routes = moe.Routes(logits, mixture.context_lens, mixture.top_k, renormalize=True)
                gated = moe.gate_experts(residual, mixture.norm, EPS, mixture.gate_up, routes)
                normed = moe.down_normed_experts(gated, mixture.down, routes, residual, mixture.norm)
            else:
                normed = self.add_grouped(mixture, residual, normed.x, inverse_rms, logits)

    def run_most(self, mixture: Mixture, residual: Tensor) -> None:
        limit = self.batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1]
        for _ in range(3):
            x = rms_norm(residual, mixture.norm, EPS)
            logits, experts = functional.linear(x, mixture.router), (mixture.gate_up, mixture.down)
            residual.add_(moe_of(x, logits, *experts, limit, top_k=mixture.top_k, renormalize=True))

    def add_grouped(
        self, mixture: Mixture, residual: Tensor, x: Tensor, inverse_rms: Tensor, logits: Tensor
    ) -> gemm.NormInput:
        experts = experts_of(mixture.gate_up, mixture.down, mixture.top_k)
        return add_grouped_experts(
            residual,
            x,
            inverse_rms,
            logits,
            GroupedMixture(mixture.gate_up, mixture.down, mixture.top_k, renormalize=True),
            self.batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1],
            mixture.norm,
            permuted=grouped_gemm.refuses(experts, len(residual)) is None,
        )


def check_replays(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay a chain as a graph; compare with its kernels one at a time."""
    with monkeypatch.context() as patch:

        def launch_alone(*args: object, **options: object) -> None:
            launch(*args, **{**options, "pdl": False})  # pyright: ignore[reportArgumentType]
            torch.cuda.synchronize()

        for module in (
            "gemm.gemv",
            "gemm.decode",
            "attention.decode",
            "moe.decode",
            "moe.grouped_gemm",
            "moe.permutation",
        ):
            patch.setattr(f"blink.kernels.gpu.{module}.launch", launch_alone)
        for module in ("moe.grouped", "moe.decode_grouped"):
            patch.setattr(f"blink.kernels.gpu.{module}.launch_options", lambda **_: {})
        chain.run()
    expected = chain.residual.clone()
    assert expected.isfinite().all() and not torch.equal(expected, chain.mixture.residual)
    chain.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for _ in range(200):
        chain.residual.zero_()
        graph.replay()
        assert torch.equal(chain.residual, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 100, 200])
def test_a_replayed_chain_gives_the_bits_of_one_that_waits_between_kernels(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_replays(Chain(rows), monkeypatch)


@pytest.mark.parametrize(("rows", "kernels"), [(1, 6), (4, 6), (13, 8)])
def test_a_captured_chain_has_pdl_edges_and_instantiates_for_launches_from_the_device(rows: int, kernels: int) -> None:
    chain = Chain(rows)
    chain.run()
    expected = chain.residual.clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        chain.run()
    assert count_pdl_edges(graph) >= 3 * kernels - 1  # the first kernel follows a copy
    chain.residual.zero_()
    launch_device_graph(graph)
    assert torch.equal(chain.residual, expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_experts_wait_for_a_residual_whose_producer_lets_them_start_early(rows: int) -> None:
    mixture = Mixture(rows, 128, 8, 1024, 256)
    expected = mixture.run()
    mixture.add_to(draw(rows, 1024))  # leaves the logits of other rows where the next ones will be
    late = torch.zeros_like(mixture.residual)
    torch.cuda.synchronize()
    produce_late(late, mixture.residual)
    assert torch.equal(mixture.add_to(late), expected)


def make_decoder() -> Decoder:
    """Make a model that chooses all experts: where two are nearly equal, another path might choose the other."""
    experts = MoeMlp(experts=32, size=128, router=Router(top_k=32, renormalize=True))
    spec = make_spec("qwen3_moe", make_attention(8, 2, 64, qk_norm="head"), experts, num_layers=3, rms_norm_eps=EPS)

    def make_layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=1 + draw(512, scale=0.1),
            qkv=draw(768, 512, scale=0.05),
            qkv_bias=None,
            output=draw(512, 512, scale=0.05),
            output_bias=None,
            head_norm=HeadNorm(1 + draw(64, scale=0.1), 1 + draw(64, scale=0.1), EPS),
            mlp_norm=1 + draw(512, scale=0.1),
            mlp=MoeWeights(
                experts, draw(32, 512, scale=0.05), draw(32, 256, 512, scale=0.05), draw(32, 512, 128, scale=0.1)
            ),
        )

    layers = [make_layer() for _ in range(3)]
    return Decoder(spec, draw(1000, 512), layers, 1 + draw(512, scale=0.1), draw(1000, 512, scale=0.05))


LENGTHS = [
    [1],
    [17, 300],
    [300, 16, 41, 0],
    [5, 6, 7, 8, 90, 0, 0, 0],
    [*range(1, 12), 0, 0],
    [*range(3, 65), 0, 0],
    [*range(1, 71), 0, 0],
    [*range(1, 129)],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_a_decoding_step_gives_the_logits_and_the_cache_of_the_general_one(lengths: list[int]) -> None:
    torch.manual_seed(9)
    decoder = make_decoder()
    assert plan_of(decoder, len(lengths)).norms is not NormStyle.KERNEL
    check_step(decoder, lengths)


def test_more_rows_take_the_general_step_with_the_attention_of_decoding_rows() -> None:
    torch.manual_seed(10)
    decoder = make_decoder()
    plan = plan_of(decoder, 140)
    assert plan.norms is NormStyle.KERNEL and "more than 128 rows" in plan.refused[1]
    assert all(layer.attend.kernel == DECODE_ATTENTION for layer in plan.layers)
    assert all(layer.experts and layer.experts.kernel == PERMUTED for layer in plan.layers)
    check_step(decoder, [*range(1, 139), 0, 0])


def check_step(decoder: Decoder, lengths: list[int]) -> None:
    rows = len(lengths)
    host_batch, num_blocks = make_batch(lengths, 512)
    host_batch.input_ids.random_(1000)
    host_batch.block_tables.clamp_(max=num_blocks - 1)
    batch = on_gpu(host_batch)
    cache = fill_cache(decoder.allocate_kv_cache(num_blocks, 16))
    twin = clone_cache(cache)
    active = sum(length > 0 for length in lengths)
    general = plan_of(decoder, rows, tokens=rows)
    assert general.norms is NormStyle.KERNEL
    assert all(layer.experts and layer.experts.kernel == GATHERED for layer in general.layers)
    expected = Runner(decoder).compute_logits(batch, twin, Bucket(rows, rows))[:active]
    found = Runner(decoder).compute_logits(batch, cache, Bucket(rows, rows, decoding=True))[:active]
    assert error(found, expected) < 3e-2
    assert error(stack_cache(cache), stack_cache(twin)) < 1e-2
