# SPDX-License-Identifier: Apache-2.0
"""Paged attention against a softmax written out token by token in float64."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from torch import Tensor

from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu import attention as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import AttentionOptions

NUM_BLOCKS, HEAD_DIM = 64, 16


def make_batch(rows: list[tuple[int, int]], block_size: int, num_padding: int = 0) -> tuple[Batch, int]:
    """Make a batch of rows (queries, context length) on shuffled blocks; unused table entries point nowhere."""
    num_tokens = sum(count for count, _ in rows) + num_padding
    batch = Batch.allocate(max_tokens=num_tokens, max_rows=16, num_slots=16, max_blocks=32, max_model_len=256)
    batch.block_tables.fill_(10**6)
    blocks = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    slots = random.Random(4).sample(range(16), 16)
    for row, (count, length) in enumerate(rows):
        needed = -(-length // block_size)
        batch.block_tables[slots[row], :needed] = torch.tensor([blocks.pop() for _ in range(needed)], dtype=torch.int32)
        batch.row_slots[row] = slots[row]
        batch.context_lens[row] = length
        batch.query_starts[row + 1] = batch.query_starts[row] + count
    batch.header[Header.NUM_ROWS] = len(rows)
    batch.header[Header.NUM_TOKENS] = num_tokens - num_padding
    batch.header[Header.NUM_DECODE_ROWS] = sum(count == 1 for count, _ in rows)
    return batch, num_tokens


def attend_naively(query: Tensor, kv_cache: Tensor, batch: Batch, rows: list[tuple[int, int]]) -> Tensor:
    """Attend with one token and head at a time."""
    block_size, kv_heads = kv_cache.shape[2:4]
    wide = kv_cache.double()
    result = torch.zeros(query.shape, dtype=torch.float64)
    token = 0
    for row, (count, length) in enumerate(rows):
        table = batch.block_tables[int(batch.row_slots[row])].tolist()
        for offset in range(count):
            visible = length - count + offset + 1
            places = [(table[i // block_size], i % block_size) for i in range(visible)]
            for head in range(query.shape[1]):
                kv_head = head * kv_heads // query.shape[1]
                keys, values = (torch.stack([part[b, o, kv_head] for b, o in places]) for part in wide)
                weights = (keys @ query[token, head].double() / math.sqrt(HEAD_DIM)).softmax(0)
                result[token, head] = weights @ values
            token += 1
    return result.flatten(1)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 40)],
        [(1, 15), (1, 16), (1, 17), (1, 100)],
        [(7, 7)],
        [(7, 30)],
        [(1, 9), (1, 33), (5, 5), (16, 48), (2, 17)],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention_of_ragged_batches_equals_the_written_out_softmax(
    rows: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(5)
    batch, num_tokens = make_batch(rows, block_size)
    kv_cache = torch.randn(2, NUM_BLOCKS, block_size, kv_heads, HEAD_DIM)
    query = torch.randn(num_tokens, heads, HEAD_DIM)
    cache = LayerCache(kv_cache)
    plan = plan_attention(batch, num_tokens, len(rows), [], cache)
    expected = attend_naively(query, kv_cache, batch, rows)
    torch.testing.assert_close(paged_attention(query, cache, plan).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(scale=0.3, softcap=2.0),
        AttentionOptions(window=5),
        AttentionOptions(window=33, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 8.0, -9.0])),
    ],
)
@pytest.mark.parametrize("dtype", cpu.NATIVE_CELLS)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("group", [1, 3, 6])
def test_native_attention_equals_that_of_pytorch(
    group: int, head_dim: int, dtype: torch.dtype, options: AttentionOptions
) -> None:
    torch.manual_seed(7)
    batch, num_tokens = make_batch([(1, 1), (1, 5), (1, 6), (1, 33), (1, 100)], 16)
    cache = LayerCache(torch.randn(2, NUM_BLOCKS, 16, 6 // group, head_dim).to(dtype))
    query = torch.randn(num_tokens, 9, head_dim)[:, :6]  # in front of keys, as the model has it
    [rows] = cpu.plan_attention(batch, num_tokens, 16, torch.float32).find_groups(options.window)
    expected = cpu.attend_torch(query, cache, rows, options)
    torch.testing.assert_close(cpu.attend_native(query, cache, rows, options), expected, rtol=1e-5, atol=1e-5)


def test_rows_do_not_read_blocks_of_others() -> None:
    rows, block_size = [(1, 5), (1, 40), (3, 20)], 8
    batch, num_tokens = make_batch(rows, block_size)
    owned = [
        block
        for row, (_, length) in enumerate(rows)
        for block in batch.block_tables[int(batch.row_slots[row]), : -(-length // block_size)].tolist()
    ]
    kv_cache = torch.full((2, NUM_BLOCKS, block_size, 2, HEAD_DIM), torch.nan)
    kv_cache[:, owned] = torch.randn(2, len(owned), block_size, 2, HEAD_DIM)
    query = torch.randn(num_tokens, 4, HEAD_DIM)
    plan = plan_attention(batch, num_tokens, len(rows), [], LayerCache(kv_cache))
    assert paged_attention(query, LayerCache(kv_cache), plan).isfinite().all()


def test_padding_tokens_give_zeros_and_change_no_other() -> None:
    rows = [(1, 12), (4, 9)]
    torch.manual_seed(6)
    cache, query = LayerCache(torch.randn(2, NUM_BLOCKS, 16, 2, HEAD_DIM)), torch.randn(8, 4, HEAD_DIM)
    exact, num_exact = make_batch(rows, 16)
    padded, num_padded = make_batch(rows, 16, num_padding=3)
    expected = paged_attention(query[:num_exact], cache, plan_attention(exact, num_exact, 2, [], cache))
    found = paged_attention(query, cache, plan_attention(padded, num_padded, 2, [], cache))
    torch.testing.assert_close(found[:num_exact], expected)
    assert not found[num_exact:].any()


def test_bfloat16_attention_is_close_to_float64() -> None:
    rows = [(1, 30), (6, 20)]
    torch.manual_seed(7)
    batch, num_tokens = make_batch(rows, 16)
    cache = LayerCache(torch.randn(2, NUM_BLOCKS, 16, 2, HEAD_DIM).bfloat16())
    query = torch.randn(num_tokens, 4, HEAD_DIM).bfloat16()
    found = paged_attention(query, cache, plan_attention(batch, num_tokens, 2, [], cache))
    expected = attend_naively(query, cache.cells, batch, rows)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [[(1, 30), (6, 20)], [(9, 9)]])
def test_a_cache_in_float16_is_read_exactly(rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(8)
    batch, num_tokens = make_batch(rows, 16)
    cells = torch.randn(2, NUM_BLOCKS, 16, 2, HEAD_DIM).half()
    query, cache = torch.randn(num_tokens, 4, HEAD_DIM), LayerCache(cells)
    plan = plan_attention(batch, num_tokens, len(rows), [], cache, torch.float32)
    found = paged_attention(query, cache, plan)
    torch.testing.assert_close(found.double(), attend_naively(query, cells, batch, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cpu.NATIVE_CELLS)
def test_tokens_that_attend_one_by_one_have_the_same_bits_in_any_chunk(dtype: torch.dtype) -> None:
    """Each query of a prompt equals, bit by bit, that of a row of its own."""
    torch.manual_seed(9)
    cells = torch.randn(2, NUM_BLOCKS, 16, 2, HEAD_DIM).to(dtype)
    cache, query = LayerCache(cells), torch.randn(24, 6, HEAD_DIM)
    batch, num_tokens = make_batch([(1, 7), (5, 21), (18, 40)], 16)
    lens = [7, *range(17, 22), *range(23, 41)]
    batch.positions[:num_tokens] = torch.tensor(lens) - 1
    [group] = cpu.plan_attention(batch, num_tokens, 16, torch.float32, by_token=True).find_groups(0)
    found = cpu.attend_native(query, cache, group, AttentionOptions())
    rows = [0] + [1] * 5 + [2] * 18
    for token, (row, length) in enumerate(zip(rows, lens, strict=True)):
        alone = dataclasses.replace(
            batch, row_slots=batch.row_slots[row : row + 1], context_lens=torch.tensor([length], dtype=torch.int32)
        )
        alone.header[:] = 0
        for word in (Header.NUM_ROWS, Header.NUM_TOKENS, Header.NUM_DECODE_ROWS):
            alone.header[word] = 1
        [single] = cpu.plan_attention(alone, 1, 16, torch.float32).find_groups(0)
        expected = cpu.attend_native(query[token : token + 1], cache, single, AttentionOptions())
        assert torch.equal(found[token : token + 1], expected)
