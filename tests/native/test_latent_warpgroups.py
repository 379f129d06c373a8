# SPDX-License-Identifier: Apache-2.0
"""Hopper's latent attention, as device code on the host's threads, against PyTorch's: rows of one query and of several,
chunks, caches that hold NaN where no token is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_items import plan_items
from conftest import CompileDevice

_RANK, _SIZE, _PAIRS, _SCALE = 512, 576, 64, 0.07
Attend = Callable[[Tensor, Tensor, Tensor, int, int, int], Tensor]


@pytest.fixture(scope="module")
def attend(compile_device: CompileDevice) -> Attend:
    """Return attend(query, cache, table, context, group, chunk_keys) of one row."""
    words = {"prefill/warpgroups.cuh": "gpu_warpgroups.h"}
    run = compile_device("latent_attention.cpp", "attention/latent.cu", words=words).attend

    def attend_row(query: Tensor, cache: Tensor, table: Tensor, context: int, group: int, chunk_keys: int) -> Tensor:
        num_tokens, heads, _ = query.shape
        items = plan_items(num_tokens, context, _PAIRS // group, chunk_keys)
        counters = torch.zeros(len(items), heads // group, dtype=torch.int32)
        partials = torch.full((len(items), heads // group, _PAIRS, _RANK), torch.nan)
        lses = partials[..., 0].contiguous()
        out = torch.full((num_tokens, heads, _RANK), torch.nan, dtype=torch.bfloat16)
        tensors = (cache, query, table, items, counters, partials, lses, out)
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        scale = ctypes.c_float(_SCALE * torch.log2(torch.tensor(torch.e)).item())
        run(pointers, group, cache.shape[1], table.stride(0), len(items), scale)
        assert not counters.any()
        return out

    return attend_row


_SHORT = [(1, 70, 1024, 20, 20, 16), (2, 66, 64, 128, 64, 8), (23, 90, 1024, 3, 3, 64)]
_LONG = [(1, 1, 64, 20, 20, 16), (1, 300, 128, 20, 20, 16), (5, 200, 128, 20, 20, 16), (1, 640, 64, 20, 20, 16)]


def list_cases() -> Iterator[Any]:
    """Return a short case of each kind of heads, and long ones."""
    yield from (pytest.param(*case) for case in _SHORT)
    yield from (pytest.param(*case, marks=pytest.mark.long) for case in _LONG)


@pytest.mark.parametrize(("num_tokens", "context", "chunk_keys", "heads", "group", "block_size"), list_cases())
def test_latents_are_attended_as_by_pytorch(
    attend: Attend, num_tokens: int, context: int, chunk_keys: int, heads: int, group: int, block_size: int
) -> None:
    torch.manual_seed(num_tokens)
    blocks = -(-context // block_size)
    table = torch.full((1, blocks + 9), 10**8, dtype=torch.int32)
    table[0, :blocks] = torch.randperm(blocks + 2)[:blocks]
    query = (torch.randn(num_tokens, heads, _SIZE) / 4).bfloat16()
    kept = torch.randn(context, _SIZE).bfloat16()
    cache = torch.full((blocks + 2, block_size, _SIZE), torch.nan, dtype=torch.bfloat16)
    places = torch.arange(context)
    cache[table[0, places // block_size].long(), places % block_size] = kept
    seen = places <= torch.arange(context - num_tokens, context)[:, None]
    scores = torch.einsum("qhd,kd->hqk", query.float(), kept.float()) * _SCALE
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,kr->qhr", weights, kept[:, :_RANK].float())
    found = attend(query, cache, table, context, group, chunk_keys)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
