# SPDX-License-Identifier: Apache-2.0
"""Prompts with keys and values made of latents, against each head's own, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.cpu import latent as cpu
from blink.kernels.cpu.rotary import round_cells
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LATENT_EPS, UNSCALED, ExpandedSizes, Expansion, KvScales, LatentSizes
from latent_rows import (
    Rows,
    attend_expanded,
    draw_expansion,
    find_cells,
    find_slots,
    join,
    make_cells,
    make_latent_batch,
    move,
)
from triton_interpreter import IS_INTERPRETED, large

gpu = pytest.importorskip("blink.kernels.gpu.latent.expanded")
gpu_heads = pytest.importorskip("blink.kernels.gpu.latent.heads")
gpu_plan = pytest.importorskip("blink.kernels.gpu.latent.plan")
gpu_rows = pytest.importorskip("blink.kernels.gpu.latent.rows")

SMALL = ExpandedSizes(LatentSizes(4, 32, 8), 16, 24)
FLASH, LITE = ExpandedSizes(LatentSizes(20, 512, 64), 192, 256), ExpandedSizes(LatentSizes(16, 512, 64), 128, 128)
KIMI, DEEPSEEK = (ExpandedSizes(LatentSizes(heads, 512, 64), 128, 128) for heads in (64, 128))
SCALES = KvScales(key=0.02)
LEAST, ALONE_LEAST = 20, 24  # queries of rows that are expanded in these tests, behind others and without

# Decode rows, a short prompt, a long one, long ones behind others, and a short one behind others.
MIXED: Rows = [(1, 40), (1, 70), (7, 7), (24, 24), (20, 90), (9, 60), (33, 49)]
ALONE: Rows = [(50, 50)]
LATER: Rows = [(35, 120)]


class Case(NamedTuple):
    """The operands of a layer, and what it gives."""

    batch: Batch
    operands: tuple[Tensor, ...]  # queries, what is kept, rotation and slots
    cells: Tensor  # of the cache, NaN wherever no row has an earlier token
    expansion: Expansion
    values: Tensor
    kept_cells: Tensor  # of the cache afterwards


@pytest.fixture(autouse=True)
def _few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expand short rows, and let the interpreter, which runs programs one by one, plan for a GPU of few SMs."""
    monkeypatch.setattr(gpu, "count_least_queries", lambda _: LEAST)
    monkeypatch.setattr(gpu_rows, "LEAST_ALONE", ALONE_LEAST)
    if device.type != "cpu":
        return
    monkeypatch.setattr(gpu_heads, "PROGRAMS", 3)
    for module, few in ((gpu_plan, {"num_programs": 12}), (gpu, {"num_programs": 40})):
        choose = module.choose_tiles
        monkeypatch.setattr(
            module,
            "choose_tiles",
            lambda *step, choose=choose, few=few: tuple(
                dataclasses.replace(tile, **few, min_chunk=32) for tile in choose(*step)
            ),
        )


def draw(rows: Rows, sizes: ExpandedSizes, padding: int, dtype: torch.dtype, kv_scales: KvScales | None) -> Case:
    """Draw a step, and compute it on the CPU from each head's keys and values."""
    torch.manual_seed(5)
    (heads, rank, rope), nope, value = sizes
    count, scales = sum(number for number, _ in rows), kv_scales or UNSCALED
    batch = make_latent_batch(rows, max_tokens=count + padding, max_rows=len(rows) + padding)
    expansion = Expansion(*(part.to(dtype).float() for part in draw_expansion(sizes.latents, nope=nope, value=value)))
    earlier = [(number, length - number) for number, length in rows]
    _, cells = make_cells(batch, earlier, sizes.latents, dtype if kv_scales is None else FP8, scales)
    query = torch.randn(count + padding, heads, nope + rope).to(dtype).float()
    kept = torch.randn(count + padding, rank + rope).to(dtype).float()
    rotation = torch.randn(count + padding, rope)
    slots = torch.full((count + padding,), -1, dtype=torch.int32)
    slots[:count] = find_slots(batch, rows)
    whole = cells.float() if kv_scales is None else torch.zeros(cells.shape, dtype=dtype)
    absorbed = cpu.absorb_and_store(query, kept, rotation, slots, LayerCache(whole), expansion, LATENT_EPS, UNSCALED)
    if kv_scales is not None:  # what is kept is rounded to the activations' type before it becomes a cell
        written, whole, rounded = slots[:count].long(), cells.clone(), whole.view(-1, rank + rope)
        cell_bytes = whole.view(torch.uint8).view(-1, rank + rope)
        cell_bytes[written] = round_cells(rounded[written].float(), kv_scales.key)
    rotated = torch.cat((query[..., :nope], absorbed[..., rank:]), dim=2)
    held = whole.float()[0, :, :, 0] * scales.key
    values = torch.zeros(count + padding, heads * value)
    values[:count] = attend_expanded(rotated[:count], batch, rows, held, expansion, 0.07)
    return Case(batch, (query, kept, rotation, slots), cells, expansion, values, whole)


def check(
    device: torch.device,
    rows: Rows,
    sizes: ExpandedSizes,
    *,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_scales: KvScales | None = None,
    layers: int = 1,
) -> None:
    """Compare a step of some layers, which have one plan, with the CPU's."""
    case = draw(rows, sizes, padding, dtype, kv_scales)
    batch, tolerance = move(case.batch, device), 3e-5 if dtype == torch.float32 else 3e-2
    query, kept, rotation, slots = (each.to(device) for each in case.operands)
    expansion = join(case.expansion, device, dtype)
    counts = len(query), len(rows) + padding
    mix = gpu.plan_expanded(batch, *counts, sizes, LayerCache(case.cells.to(device)), dtype)
    for _ in range(layers):
        cache = LayerCache(case.cells.to(device))
        operands = query.to(dtype), kept.to(dtype), rotation, slots, cache, expansion
        found = mix(*operands, 0.07, kv_scales or UNSCALED)
        torch.testing.assert_close(found.cpu().float(), case.values, rtol=tolerance, atol=tolerance)
        for row, (_, length) in enumerate(rows):
            at = find_cells(case.batch, row, length)
            kept_tolerance = tolerance if kv_scales is None else 0.07  # a step of FP8
            cells, expected = (each.float()[0, :, :, 0][at] for each in (cache.cells.cpu(), case.kept_cells))
            torch.testing.assert_close(cells, expected, rtol=kept_tolerance, atol=kept_tolerance)


def set_room(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Give a step room for so many earlier tokens."""
    monkeypatch.setattr(gpu, "count_room", lambda *_: tokens)


@pytest.mark.parametrize("room", [60, 200, 0])
@pytest.mark.parametrize("rows", [MIXED, LATER, ALONE], ids=["mixed", "later", "alone"])
def test_rows_of_all_lengths_attend(
    device: torch.device, rows: Rows, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, room)
    check(device, rows, SMALL)


def test_layers_share_a_plan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, 50)
    check(device, LATER, SMALL, layers=2)


@pytest.mark.parametrize("room", [50, 200])
def test_padding_gives_zeros(device: torch.device, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first row, whose number padding has in a plan, skips tokens."""
    set_room(monkeypatch, room)
    check(device, LATER, SMALL, padding=2)


@pytest.mark.parametrize("room", [50, 200])
def test_a_cache_in_fp8_gives_what_its_numbers_stand_for(
    device: torch.device, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, room)
    check(device, LATER, SMALL, kv_scales=SCALES, padding=1)
    if not IS_INTERPRETED:
        check(device, MIXED, FLASH, kv_scales=SCALES, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "sizes",
    [FLASH, *(pytest.param(one, marks=large) for one in (LITE, KIMI, DEEPSEEK))],
    ids=["flash", "lite", "kimi", "deepseek"],
)
def test_published_sizes_attend(device: torch.device, sizes: ExpandedSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, 20)
    if sizes == FLASH:
        check(device, [(1, 20), (21, 50)], sizes)
    if not IS_INTERPRETED:
        for room in (200, 50, 0):
            set_room(monkeypatch, room)
            check(device, MIXED, sizes, dtype=torch.bfloat16, padding=3)
            check(device, [(300, 500)], sizes, dtype=torch.bfloat16)


def divide(rows: Rows, room: int) -> tuple[list[int], list[int], list[int], list[int], list[bool]]:
    """Return what divide_rows() does, token by token: of each row the first three."""
    expanded, starts, skipped, sources, absorbed = [], [], [], [], []
    batch = make_latent_batch(rows, max_tokens=sum(count for count, _ in rows), max_rows=len(rows))
    left, wanted = room, 0
    for row, (count, length) in enumerate(rows):
        earlier = length - count
        taken = min(earlier, left)
        is_prompt = count > 1 and (count >= LEAST or (earlier == 0 and count >= ALONE_LEAST))
        wanted += earlier if is_prompt else 0
        is_expanded = is_prompt and (earlier == 0 or wanted <= 2 * room)
        number = count + taken if is_expanded else 0
        left -= taken if is_expanded else 0
        blocks, places = find_cells(batch, row, length)
        cells = (blocks * 16 + places).tolist()
        starts.append(len(sources))
        sources += cells[length - number :]
        expanded.append(number)
        skipped.append(length - number if is_expanded else 0)
        absorbed += count * [not is_expanded]
    return expanded, starts, skipped, sources, absorbed


@pytest.mark.parametrize("room", [50, 70, 200, 0])
@pytest.mark.parametrize("rows", [MIXED, LATER, [(19, 80), (20, 80)], [(23, 23), (24, 24)], [(1, 1)]], ids=str)
def test_rows_are_divided_by_their_queries_and_the_room(device: torch.device, rows: Rows, room: int) -> None:
    padding = 2
    count = sum(number for number, _ in rows) + padding
    batch = move(make_latent_batch(rows, max_tokens=count, max_rows=len(rows) + padding), device)
    found = gpu_rows.divide_rows(batch, count, len(rows) + padding, room, LEAST, 16)
    expanded, starts, skipped, sources, absorbed = divide(rows, room)
    nothing = (padding + 1) * [0]
    assert found.num_expanded.tolist() == [*expanded, *nothing]
    assert found.starts.tolist()[: len(rows)] == starts
    assert found.skipped.tolist() == [*skipped, *nothing]
    assert found.used.tolist() == [len(sources)]
    assert found.sources.tolist() == sources + (count + room - len(sources)) * [-1]
    assert found.is_absorbed.tolist() == [*map(int, absorbed), *padding * [1]]


def test_as_many_queries_as_expanding_costs_make_it_cheaper() -> None:
    """GLM-4.7-Flash: 512 * (192 + 256) against 2 * 512 - 192 - 256 saved by each query."""
    assert [gpu_rows.count_least_queries(sizes) for sizes in (FLASH, DEEPSEEK)] == [399, 171]


def test_a_graph_serves_every_batch(device: torch.device) -> None:
    """What a plan holds is written on the GPU, so that a captured step runs other rows."""
    if device.type != "cuda":
        pytest.skip("the interpreter captures no graphs")
    first, second = (draw(rows, SMALL, 100 - sum(n for n, _ in rows), torch.float32, None) for rows in (LATER, ALONE))
    batch = move(make_latent_batch(LATER, max_tokens=100, max_rows=66), device)
    expansion = join(second.expansion, device, torch.float32)
    cache = LayerCache(first.cells.to(device))
    operands = [each.to(device) for each in first.operands]

    def run() -> Tensor:
        mix = gpu.plan_expanded(batch, 100, 66, SMALL, cache, torch.float32)
        return mix(*operands, cache, expansion, 0.07, UNSCALED)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    other = make_latent_batch(ALONE, max_tokens=100, max_rows=66)
    for field in dataclasses.fields(Batch):
        getattr(batch, field.name).copy_(getattr(other, field.name))
    for target, source in zip(operands, second.operands, strict=True):
        target.copy_(source)
    cache.cells.copy_(second.cells)
    graph.replay()
    torch.testing.assert_close(found.cpu(), second.values, rtol=3e-5, atol=3e-5)
