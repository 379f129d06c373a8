# SPDX-License-Identifier: Apache-2.0
"""The attention kernels against the plain reference: ragged rows, chunked keys, padding and captured graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attention_batch import Rows, make_attention_batch
from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu import attention as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, KvScales
from model_specs import make_attention

gpu_attention = pytest.importorskip("blink.kernels.gpu.attention.paged")
gpu_plan = pytest.importorskip("blink.kernels.gpu.attention.plan")
gpu_tiles = pytest.importorskip("blink.kernels.gpu.attention.tiles")
gpu_work = pytest.importorskip("blink.kernels.gpu.attention.work")

MAX_LEN = 1024
DECODE: Rows = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 700)]
MIXED: Rows = [(1, 40), (1, 600), (7, 7), (33, 530), (2, 16), (70, 71)]


@pytest.fixture(autouse=True)
def _few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, which runs one program after the other, plan for a GPU of few SMs."""
    if device.type == "cpu":
        choose = gpu_plan.choose_tiles
        monkeypatch.setattr(
            gpu_plan,
            "choose_tiles",
            lambda *step: tuple(dataclasses.replace(tile, num_programs=24) for tile in choose(*step)),
        )


def make_batch(rows: Rows, block_size: int, *, max_tokens: int, max_rows: int) -> Batch:
    """Make a CPU batch of rows (queries, context length) on shuffled blocks; unused table entries point nowhere."""
    sizes = {"block_size": block_size, "num_blocks": num_blocks(rows, block_size), "max_len": MAX_LEN}
    return make_attention_batch(rows, **sizes, max_tokens=max_tokens, max_rows=max_rows)


def num_blocks(rows: Rows, block_size: int) -> int:
    return sum(-(-length // block_size) for _, length in rows) + 2


def make_cache(batch: Batch, rows: Rows, block_size: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Make a random cache, and one that holds NaN wherever no row has a token."""
    cache = torch.randn(2, num_blocks(rows, block_size), block_size, kv_heads, head_dim)
    poisoned = torch.full_like(cache, torch.nan)
    for row, (_, length) in enumerate(rows):
        places = torch.arange(length)
        block = batch.block_tables[batch.row_slots[row], places // block_size]
        poisoned[:, block, places % block_size] = cache[:, block, places % block_size]
    return cache, poisoned


def move(batch: Batch, device: torch.device) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)})


def check(
    device: torch.device,
    rows: Rows,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    padding: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> None:
    """Compare kernel and reference on a batch with `padding` (tokens, rows); twice with one plan, as layers use it."""
    torch.manual_seed(5)
    num_tokens = sum(count for count, _ in rows)
    batch = make_batch(rows, block_size, max_tokens=num_tokens + padding[0], max_rows=len(rows) + padding[1])
    cache, poisoned = make_cache(batch, rows, block_size, heads[1], head_dim)
    query = torch.randn(num_tokens + padding[0], heads[0], head_dim).to(dtype)
    cache, poisoned = cache.to(cache_dtype or dtype), poisoned.to(cache_dtype or dtype).to(device)
    expected = torch.zeros(query.shape).flatten(1)
    expected[:num_tokens] = cpu.paged_attention(
        query[:num_tokens].float(),
        LayerCache(cache if cache_dtype else cache.float()),
        cpu.plan_attention(batch, num_tokens, block_size, torch.float32),
        options,
    )
    attention = make_attention(
        *heads, head_dim, window=options.window, chunk=options.chunk, softcap=options.softcap, scale=options.scale,
        sinks=options.sinks is not None,
    )  # fmt: skip
    if options.sinks is not None:
        options = dataclasses.replace(options, sinks=options.sinks.to(device))
    moved, on_device = move(batch, device), LayerCache(poisoned)
    plan = gpu_plan.plan_attention(moved, len(query), len(rows) + padding[1], [attention], on_device, dtype)
    spread = options.scale_for(head_dim) * head_dim**0.5  # of the scores, whose roundings grow with it
    tolerance = 2e-5 * max(1.0, spread / 4) if dtype == torch.float32 else 2e-2
    for _ in range(2):
        found = gpu_attention.paged_attention(query.to(device), on_device, plan, options)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("rows", [DECODE, MIXED, [(1, 1)], [(130, 130)]], ids=["decode", "mixed", "one", "prompt"])
def test_attention_equals_the_reference_for_each_block_size(device: torch.device, rows: Rows, block_size: int) -> None:
    check(device, rows, block_size=block_size)


@pytest.mark.parametrize("rows", [DECODE[1:4], [(1, 9), (20, 29)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1), (8, 1), (20, 1)])
def test_attention_equals_the_reference_for_each_shape_of_heads(
    device: torch.device, rows: Rows, heads: tuple[int, int], head_dim: int
) -> None:
    check(device, rows, heads=heads, head_dim=head_dim)


@pytest.mark.parametrize("rows", [DECODE[1:], [(1, 9), (1, 500), (20, 290)]], ids=["decode", "mixed"])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 512), ((3, 3), 320), ((32, 4), 512)])
def test_heads_larger_than_usual_equal_the_reference(
    device: torch.device, rows: Rows, heads: tuple[int, int], head_dim: int
) -> None:
    """Whose partial results another kernel adds up."""
    check(device, rows, heads=heads, head_dim=head_dim, padding=(3, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_half_precision_is_close_to_the_reference(
    device: torch.device, rows: Rows, dtype: torch.dtype, head_dim: int
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    check(device, rows, heads=(8, 2), head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_of_long_steps_are_close_to_the_reference_too(
    device: torch.device, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tiles, "_SHORT_PAIRS", 0)
    check(device, MIXED, heads=(8, 2), head_dim=head_dim, dtype=torch.float16, padding=(3, 2))


FEW: Rows = [(1, 1), (1, 17), (1, 200)]
CHUNKS: Rows = [(1, 40), (20, 150)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (FEW, AttentionOptions(scale=0.3, window=1)),
        (CHUNKS, AttentionOptions(window=40)),
        (FEW, AttentionOptions(chunk=24)),
        (CHUNKS, AttentionOptions(chunk=140)),
        (FEW, AttentionOptions(softcap=2.0, window=100)),
        (CHUNKS, AttentionOptions(sinks=torch.tensor([-1.0, 2.0, 0.5, 4.0]))),
        (FEW, AttentionOptions(sinks=torch.tensor([3.0, 0.0, -2.0, 1.0]), window=65, softcap=1.5, scale=0.5)),
        (CHUNKS, AttentionOptions(sinks=torch.tensor([3.0, 0.0, -2.0, 1.0]), window=65, softcap=1.5, scale=0.5)),
    ],
    ids=["one-key", "window", "chunk-decode", "chunk-mixed", "cap", "sinks", "all-decode", "all-mixed"],
)
def test_windows_chunks_caps_and_sinks_equal_the_reference(
    device: torch.device, rows: Rows, options: AttentionOptions
) -> None:
    check(device, rows, options=options, padding=(3, 2))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (FEW, AttentionOptions()),
        (CHUNKS, AttentionOptions(kv_scales=KvScales(0.25, 3.0))),
        (CHUNKS, AttentionOptions(sinks=torch.tensor([3.0, 0.0, -2.0, 1.0]), window=65, kv_scales=KvScales(1.5, 0.1))),
        (FEW, AttentionOptions(softcap=1.5, kv_scales=KvScales(2.0, 0.5))),
    ],
    ids=["decode", "scaled", "sinks", "cap"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_fp8_is_attended_as_the_reference_does(
    device: torch.device, rows: Rows, options: AttentionOptions, dtype: torch.dtype
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    check(device, rows, options=options, padding=(3, 2), dtype=dtype, cache_dtype=FP8)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (DECODE, AttentionOptions(scale=1.0)),
        (CHUNKS, AttentionOptions(window=65, softcap=1.5, scale=0.1)),
        (CHUNKS, AttentionOptions(sinks=torch.tensor([3.0, 0.0, -2.0, 1.0]))),
    ],
    ids=["decode", "window", "sinks"],
)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_heads_larger_than_usual_have_every_option(
    device: torch.device, rows: Rows, options: AttentionOptions, cache_dtype: torch.dtype | None
) -> None:
    if cache_dtype is not None:
        options = dataclasses.replace(options, kv_scales=KvScales(1.5, 0.1))
    check(device, rows, head_dim=512, options=options, padding=(3, 2), cache_dtype=cache_dtype)


@pytest.mark.parametrize(("window", "context"), [(256, 1000), (64, 700), (200, 201), (1000, 30)])
@pytest.mark.parametrize("queries", [1, 20])
def test_no_program_has_keys_behind_the_window(
    device: torch.device, window: int, context: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their chunks are as long as those of a context of the window's length."""
    tile = dataclasses.replace(gpu_tiles.choose_tiles(torch.float32, 1, 1, 64)[0], num_programs=4)
    monkeypatch.setattr(gpu_plan, "choose_tiles", lambda *_: (tile, tile))
    rows: Rows = [(queries, context)]
    batch = move(make_batch(rows, 16, max_tokens=queries, max_rows=1), device)
    cache = LayerCache(torch.zeros(2, num_blocks(rows, 16), 16, 1, 64, device=device))
    plan = gpu_plan.plan_attention(batch, queries, 1, [make_attention(1, 1, 64, window=window)], cache)
    keys = list[int]()
    for work in plan.work_lists:
        for item in work.items.cpu():
            if not item[gpu_work.NUM_QUERIES.value]:
                continue
            position = int(item[gpu_work.FIRST_POSITION.value])
            first, end = int(item[gpu_work.FIRST_KEY.value]), int(item[gpu_work.END_KEY.value])
            assert max(position - window + 1, 0) <= first < end <= context
            keys.append(end - first)
    seen = min(context, window + queries - 1)
    tiles = -(-queries // tile.block_m)
    assert sum(keys) >= seen if tiles > 1 else sum(keys) == seen
    assert max(keys) <= max(tile.min_chunk, -(-tiles * seen // tile.num_programs)) + tile.block_n


@pytest.mark.parametrize("padding", [(3, 3), (60, 5), (0, 4)])
@pytest.mark.parametrize("rows", [DECODE[:3], MIXED[:4]], ids=["decode", "mixed"])
def test_padding_gives_zeros_and_reads_nothing(device: torch.device, rows: Rows, padding: tuple[int, int]) -> None:
    check(device, rows, padding=padding)


@pytest.mark.parametrize(
    ("head_dim", "kilobytes", "stages"),
    [(128, 228, [3, 3]), (256, 228, [3, 2]), (128, 100, [3, 2]), (512, 228, [3, 2]), (512, 164, [2, 1])],
)
def test_tiles_have_as_many_stages_as_shared_memory_holds(head_dim: int, kilobytes: int, stages: list[int]) -> None:
    tiles = gpu_tiles.choose_tiles(torch.bfloat16, 4, 512 * 32, head_dim)
    assert [gpu_tiles.fit_stages(tile, head_dim * 2, kilobytes << 10).num_stages for tile in tiles] == stages


def test_a_tile_that_does_not_fit_has_fewer_pairs() -> None:
    _, wide = gpu_tiles.choose_tiles(torch.bfloat16, 8, 1, 512)
    fitted = gpu_tiles.fit_stages(wide, 1024, 100 << 10, 8)
    assert (wide.block_m, fitted.block_m, fitted.num_stages) == (64, 16, 1)
    assert gpu_tiles.fit_stages(wide, 1024, 100 << 10, 32).block_m == 32


def test_longer_rows_in_a_bucket_of_as_many_rows_as_tokens_are_attended(device: torch.device) -> None:
    rows: Rows = [(1, 20), (3, 40), (17, 300)]
    check(device, rows, padding=(11, 29))


def test_a_captured_graph_serves_every_batch_of_its_bucket(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter captures no graphs")
    torch.manual_seed(6)
    largest: Rows = [(1, 1000), (1, 900), (40, 800), (22, 22)]
    sizes = {"max_tokens": 64, "max_rows": 4}
    batch = move(make_batch(largest, 16, **sizes), device)
    cache = LayerCache(torch.randn(2, num_blocks(largest, 16), 16, 2, 64))
    on_device = LayerCache(cache.cells.to(device))
    query = torch.randn(64, 8, 64)

    def run() -> Tensor:
        plan = gpu_plan.plan_attention(batch, 64, 4, [make_attention(8, 2, 64)], on_device)
        return gpu_attention.paged_attention(query_on_device, on_device, plan)

    query_on_device = query.to(device)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for rows in ([(1, 7)], largest, [(1, 64), (1, 65), (1, 1000)], [(64, 500)], [(2, 2), (3, 600), (5, 90), (6, 6)]):
        step = make_batch(rows, 16, **sizes)
        for field in dataclasses.fields(batch):
            getattr(batch, field.name).copy_(getattr(step, field.name))
        graph.replay()
        num_tokens = int(step.header[Header.NUM_TOKENS])
        plan = cpu.plan_attention(step, num_tokens, 16, torch.float32)
        expected = cpu.paged_attention(query[:num_tokens], cache, plan)
        torch.testing.assert_close(found[:num_tokens].cpu(), expected, rtol=2e-5, atol=2e-5)
        assert not found[num_tokens:].any()
