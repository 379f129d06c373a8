# SPDX-License-Identifier: Apache-2.0
"""The kernels of latent attention against expanded keys and values, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels import latent
from blink.kernels.batch import Batch
from blink.kernels.cpu import latent as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LATENT_EPS, UNSCALED, Expansion, KvScales, LatentSizes
from latent_rows import DECODE, MIXED, Rows, attend_expanded, draw_expansion, join, make_cells, make_latent_batch, move
from triton_interpreter import IS_INTERPRETED, large

gpu_kernels = pytest.importorskip("blink.kernels.gpu.latent.kernels")
gpu_plan = pytest.importorskip("blink.kernels.gpu.latent.plan")
gpu_store = pytest.importorskip("blink.kernels.gpu.latent.store")

FLASH, SMALL, LITE = LatentSizes(20, 512, 64), LatentSizes(4, 32, 8), LatentSizes(16, 512, 64)
KIMI, DEEPSEEK = LatentSizes(64, 512, 64), LatentSizes(128, 512, 64)
SCALES = KvScales(key=0.02)


@pytest.fixture(autouse=True)
def _few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, which runs one program after the other, plan for a GPU of few SMs."""
    if device.type == "cpu":
        choose = gpu_plan.choose_tiles
        few = {"num_programs": 12, "min_chunk": 64}
        monkeypatch.setattr(
            gpu_plan, "choose_tiles", lambda *step: tuple(dataclasses.replace(tile, **few) for tile in choose(*step))
        )


def check(
    device: torch.device,
    rows: Rows,
    sizes: LatentSizes,
    *,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_scales: KvScales | None = None,
) -> None:
    """Compare with each head's own keys and values; twice with one plan, as layers use it."""
    torch.manual_seed(5)
    count, scale = sum(number for number, _ in rows), 0.07
    batch = make_latent_batch(rows, max_tokens=count + padding, max_rows=len(rows) + padding)
    expansion = draw_expansion(sizes, nope=16, value=24)
    cells, poisoned = make_cells(batch, rows, sizes, dtype if kv_scales is None else FP8, kv_scales or UNSCALED)
    query = torch.randn(count + padding, sizes.heads, 16 + sizes.rope).to(dtype).float()
    expected = torch.zeros(count + padding, sizes.heads * 24)
    expected[:count] = attend_expanded(query[:count], batch, rows, cells, expansion, scale)
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", query[..., :16], expansion.keys), query[..., 16:]), dim=2).to(
        dtype
    )
    on_device, cache = move(batch, device), LayerCache(poisoned.to(device))
    attend = gpu_kernels.KERNELS.plan(on_device, len(query), len(rows) + padding, sizes, cache, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for _ in range(2):
        found = attend(absorbed.to(device), cache, scale, kv_scales or UNSCALED)
        values = latent.multiply_values(found.cpu().float(), expansion)
        torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [DECODE, MIXED, [(1, 1)], [(70, 70)]], ids=["decode", "mixed", "one", "prompt"])
def test_rows_of_all_lengths_attend_to_their_latents(device: torch.device, rows: Rows) -> None:
    check(device, rows, SMALL)


def test_padding_gives_zeros(device: torch.device) -> None:
    check(device, MIXED, SMALL, padding=3)
    check(device, DECODE, SMALL, padding=2)


@pytest.mark.parametrize("rows", [DECODE[2:4], MIXED[1:4]], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "sizes", [FLASH, *(pytest.param(sizes, marks=large) for sizes in (LITE, KIMI, DEEPSEEK))], ids=str
)
def test_published_sizes_attend(device: torch.device, rows: Rows, sizes: LatentSizes) -> None:
    check(device, rows, sizes)
    if not IS_INTERPRETED:
        check(device, rows, sizes, dtype=torch.bfloat16)


@large
@pytest.mark.parametrize("sizes", [FLASH, LITE, KIMI, DEEPSEEK], ids=str)
@pytest.mark.parametrize("rows", [DECODE, MIXED, [(1, 1)], [(70, 70)], 7 * [(1, 70)]], ids=lambda rows: str(rows[0]))
def test_rows_of_16_bits_attend_by_the_kernel_of_the_gpu(device: torch.device, rows: Rows, sizes: LatentSizes) -> None:
    check(device, rows, sizes, padding=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [DECODE[:4], MIXED], ids=["decode", "mixed"])
def test_a_cache_in_fp8_gives_what_its_numbers_stand_for(device: torch.device, rows: Rows) -> None:
    check(device, rows, SMALL, kv_scales=SCALES)
    check(device, DECODE[:2], FLASH, kv_scales=SCALES)


def store(device: torch.device, sizes: LatentSizes, dtype: torch.dtype, kv_scales: KvScales | None) -> None:
    """Compare queries and cells with those of the CPU, where slots of -1 write nothing."""
    torch.manual_seed(9)
    tokens, nope = 5, 16
    cells = torch.full((1, 3, 16, 1, sizes.rank + sizes.rope), 1.0).to(dtype if kv_scales is None else FP8)
    expansion = Expansion(*(part.to(dtype) for part in draw_expansion(sizes, nope=nope, value=24)))
    # Parts of wider rows, as projections are.
    query = torch.randn(tokens, sizes.heads * (nope + sizes.rope) + 3).to(dtype)[:, :-3]
    query = query.unflatten(1, (sizes.heads, -1))
    kept = 3 * torch.randn(tokens, sizes.rank + sizes.rope + 7).to(dtype)[:, 7:]
    rotation, slots = torch.randn(tokens, sizes.rope), torch.tensor([17, -1, 40, 3, -1], dtype=torch.int32)
    operands = query, kept, rotation, slots
    expected_cache, found_cache = LayerCache(cells.clone()), LayerCache(cells.to(device))
    rest = (LATENT_EPS, kv_scales or UNSCALED)
    expected = cpu.absorb_and_store(*operands, expected_cache, expansion, *rest)
    on_device = join(expansion, device, dtype)
    found = gpu_kernels.KERNELS.store(*(each.to(device) for each in operands), found_cache, on_device, *rest)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    cells_tolerance = tolerance if kv_scales is None else 0.07  # a step of FP8
    compare_cells(found_cache.cells.cpu(), expected_cache.cells, cells_tolerance)


def compare_cells(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_scales", [None, SCALES], ids=["16", "fp8"])
@pytest.mark.parametrize("sizes", [SMALL, FLASH], ids=str)
def test_queries_and_cells_are_those_of_the_cpu(
    device: torch.device, sizes: LatentSizes, kv_scales: KvScales | None
) -> None:
    store(device, sizes, torch.float32, kv_scales)
    if not IS_INTERPRETED:
        store(device, sizes, torch.bfloat16, kv_scales)


@pytest.mark.parametrize("kv_scales", [None, SCALES], ids=["16", "fp8"])
@pytest.mark.parametrize("sizes", [SMALL, FLASH], ids=str)
def test_queries_and_cells_of_few_tokens_are_those_of_the_cpu(
    device: torch.device, sizes: LatentSizes, kv_scales: KvScales | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED and kv_scales is not None:
        pytest.skip("Triton's interpreter rounds to FP8 wrongly")
    monkeypatch.setattr(gpu_store, "MOST_TOKENS", 8)
    store(device, sizes, torch.float32, kv_scales)
    store(device, sizes, torch.bfloat16, kv_scales)


@pytest.mark.parametrize("sizes", [SMALL, FLASH], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("value", [24, 256])
def test_values_of_few_tokens_are_those_of_a_batched_gemm(
    device: torch.device, sizes: LatentSizes, tokens: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_store, "MOST_TOKENS", 8)
    torch.manual_seed(value)
    expansion = draw_expansion(sizes, nope=16, value=value)
    attended = torch.randn(tokens, sizes.heads, sizes.rank)
    expected = latent.multiply_values(attended, expansion)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        on_device = join(expansion, device, dtype)
        found = gpu_kernels.KERNELS.expand(attended.to(device, dtype), on_device)
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.cpu().float() / scale, expected / scale, rtol=tolerance, atol=tolerance)


def test_each_of_few_tokens_gets_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drafts are compared with rows of one token."""
    monkeypatch.setattr(gpu_store, "MOST_TOKENS", 8)
    expansion = join(draw_expansion(SMALL, nope=16, value=24), device, torch.float32)
    attended = torch.randn(1, SMALL.heads, SMALL.rank, device=device).expand(5, -1, -1).contiguous()
    alone = gpu_kernels.KERNELS.expand(attended[:1].contiguous(), expansion)
    assert torch.equal(gpu_kernels.KERNELS.expand(attended, expansion), alone.expand(5, -1))


def test_a_graph_serves_every_batch(device: torch.device) -> None:
    """What a plan holds is written on the GPU, so that a captured step runs other rows."""
    if device.type != "cuda":
        pytest.skip("the interpreter captures no graphs")
    torch.manual_seed(2)
    first, second = (
        move(make_latent_batch(rows, max_tokens=4, max_rows=4), device) for rows in (DECODE[:4], DECODE[1:5])
    )
    cells = torch.randn(1, 200, 16, 1, 40, device=device)
    cache, query = LayerCache(cells), torch.randn(4, 4, 40, device=device)

    def run(batch: Batch) -> Tensor:
        return gpu_kernels.KERNELS.plan(batch, 4, 4, SMALL, cache, torch.float32)(query, cache, 0.1, UNSCALED)

    expected = run(second)
    run(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(first)
    for field in dataclasses.fields(Batch):
        getattr(first, field.name).copy_(getattr(second, field.name))
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
