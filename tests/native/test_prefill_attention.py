# SPDX-License-Identifier: Apache-2.0
"""Hopper's attention of prompts, as device code on the host's threads, against PyTorch's: tiles, chunks, caches that
hold NaN where no token is."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_items import plan_items
from conftest import CompileDevice

_KV_HEADS, _HEAD_DIM, _TILE_PAIRS = 2, 128, 128
Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@pytest.fixture(scope="module")
def attend(compile_device: CompileDevice) -> Attend:
    """Return attend(query, cache, table, context, chunk_keys) of one row."""
    words = {"prefill/warpgroups.cuh": "gpu_warpgroups.h"}
    run = compile_device("prefill_attention.cpp", "prefill/attention.cu", words=words).attend

    def attend_row(query: Tensor, cache: Tensor, table: Tensor, context: int, chunk_keys: int) -> Tensor:
        num_tokens, heads, _ = query.shape
        items = plan_items(num_tokens, context, _TILE_PAIRS // (heads // _KV_HEADS), chunk_keys)
        counters = torch.zeros(len(items), _KV_HEADS, dtype=torch.int32)
        partials = torch.full((len(items), _KV_HEADS, _TILE_PAIRS, _HEAD_DIM), torch.nan)
        lses, out = partials[..., 0].contiguous(), torch.full_like(query, torch.nan)
        tensors = (cache, query, table, items, counters, partials, lses, out)
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        sizes = (heads // _KV_HEADS, cache.shape[1], cache.shape[2], table.stride(0), len(items))
        run(pointers, *sizes, ctypes.c_float(math.log2(math.e) / math.sqrt(_HEAD_DIM)))
        assert not counters.any()
        return out

    return attend_row


_HEADS = [(4, 16), (3, 8), (1, 128)]
_SHAPES = [(2, 2, 1024), (33, 300, 1024), (40, 390, 128), (5, 700, 1024)]
_SHORT = [(2, 2, 1024), (33, 90, 1024), (18, 260, 128)]


def list_cases() -> Iterator[Any]:
    """Return each shape with each kind of heads, which take long, and a short one for each kind."""
    yield from (pytest.param(*shape, *heads) for shape, heads in zip(_SHORT, _HEADS, strict=True))
    for shape, heads in itertools.product(_SHAPES, _HEADS):
        if (shape, heads) != (_SHORT[0], _HEADS[0]):
            yield pytest.param(*shape, *heads, marks=pytest.mark.long)


@pytest.mark.parametrize(("num_tokens", "context", "chunk_keys", "group", "block_size"), list_cases())
def test_prompts_are_attended_as_by_pytorch(
    attend: Attend, group: int, block_size: int, num_tokens: int, context: int, chunk_keys: int
) -> None:
    torch.manual_seed(num_tokens)
    blocks = -(-context // block_size)
    table = torch.full((1, blocks + 9), 10**8, dtype=torch.int32)
    table[0, :blocks] = torch.randperm(blocks + 2)[:blocks]
    query = torch.randn(num_tokens, group * _KV_HEADS, _HEAD_DIM).bfloat16()
    kv = torch.randn(2, context, _KV_HEADS, _HEAD_DIM).bfloat16()
    cache = torch.full((2, blocks + 2, block_size, _KV_HEADS, _HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    places = torch.arange(context)
    cache[:, table[0, places // block_size], places % block_size] = kv
    keys, values = kv.float().transpose(1, 2).repeat_interleave(group, dim=1)
    seen = places <= torch.arange(context - num_tokens, context)[:, None]
    expected = scaled_dot_product_attention(query.float().transpose(0, 1), keys, values, attn_mask=seen)
    found = attend(query, cache, table, context, chunk_keys)
    torch.testing.assert_close(found.float(), expected.transpose(0, 1), rtol=2e-2, atol=2e-2)
