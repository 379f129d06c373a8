# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that decode, from the QKV projection on: head norms, rotation, the KV cache write, softmax.

How keys are divided depends on a tile config. With one for all steps a token has the same bits in any of them, also if
it is of a prompt, whose tokens are then rows of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blink.formats.base import name_dtype
from blink.formats.fp8 import FP8
from blink.formats.schemes import FormatId
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.gemm.decode_hi_lo import name_order, new_rows
from blink.kernels.gpu.gemm.tile_configs import (
    TILE_KEYS,
    AttentionConfig,
    attention_key,
    choose_attention_config,
    name_origin,
    read_table,
)
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import encode_cells
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, HeadNorm, KvScales
from blink.plan.site import first_reason

if TYPE_CHECKING:
    from blink.models.layers import Attention

_HEAD_DIMS, _MAX_GROUP = (64, 128), 8
_STORED_HEADS = 4  # attention.cuh's kStoredHeads
_ORDERED_ROWS = 8  # whose tile config all sizes of step have where one order is wanted


def refuses(attention: Attention, block_size: int, dtype: str) -> str | None:
    """Say why the kernel does not take a layer's attention, with queries of a type and a cache of that or FP8.

    None: it takes it.
    """
    options = {
        **dict.fromkeys(attention.options_beyond("qk_norm", "qkv_bias", "output_bias"), True),
        "one norm over all heads": attention.qk_norm == "all_heads",
    }
    heads = (attention.heads, attention.kv_heads)
    return first_reason(options) or _refuses_sizes(
        attention.head_dim, attention.rope.rotary_dim, heads, block_size, dtype
    )


def _refuses_sizes(head_dim: int, rotary_dim: int, heads: tuple[int, int], block_size: int, dtype: str) -> str | None:
    """Say which size or type the kernel does not take; heads: of queries, of keys and values."""
    group, rest = divmod(*heads)
    return first_reason(
        {
            f"heads of {head_dim}": head_dim not in _HEAD_DIMS,
            f"{rotary_dim} rotated components": not 0 < rotary_dim <= head_dim or 16 * rotary_dim % head_dim != 0,
            f"{group} query heads per KV head": group > _MAX_GROUP or rest > 0,
            f"blocks of {block_size} tokens": block_size % TILE_KEYS != 0,
            f"queries in {dtype}": dtype != "bfloat16",
        }
    )


def describe(attention: Attention, rows: int) -> str:
    """Return the kernel's tiles for so many rows, in words."""
    heads = rows * attention.kv_heads
    config = choose_attention_config(heads, attention.group)
    measured = attention_key(heads, attention.group) in read_table() or attention_key(heads) in read_table()
    return f"{_describe_config(config)} ({name_origin(measured=measured)})"


def describe_ordered(attention: Attention) -> str:
    """Return the tiles of all sizes of step, in words."""
    return _describe_config(choose_attention_config(_ORDERED_ROWS * attention.kv_heads, attention.group))


def _describe_config(config: AttentionConfig) -> str:
    return f"cluster of {config.cluster}, {config.warps} warps, {config.stages} stages"


def list_tokens(batch: Batch, num_tokens: int, num_rows: int) -> Batch:
    """Return a batch in which each of some tokens, padding included, is a row of its own, for stored attention."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.positions.device)
    ends = batch.query_starts[1 : num_rows + 1]  # what lies behind these is of other steps
    rows = torch.searchsorted(ends, tokens, right=True).clamp_(max=num_rows - 1)
    padding = tokens >= batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1]
    lengths = (batch.positions[:num_tokens] + 1).masked_fill_(padding, 0)
    return replace(batch, row_slots=batch.row_slots.index_select(0, rows), context_lens=lengths)


def decode_attention(
    qkv: Tensor,
    cache: LayerCache,
    batch: Batch,
    rotary_table: Tensor,
    head_norm: HeadNorm | None = None,
    *,
    kv_scales: KvScales = UNSCALED,
    hi_lo: FormatId | None = None,
    ordered: bool = False,
    stored: bool = False,
) -> Tensor:
    """Return the attention [rows, heads * head_dim] of rows of one token and write their keys and values to the cache.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim], row r of which is the batch's token r; cache: of qkv's type, or
    FP8 with kv_scales; rotary_table: float32 [positions, rotary_dim]; hi_lo: return hi/lo FP8 of it for such weights.
    Rows without context give zeros. Rows of one slot stand together, in the order of their positions, if the batch has
    siblings. No kernel of the same step may write the batch or the cache's older tokens: they are read before the wait.

    ordered: a row's bits do not depend on the others; stored: another kernel writes all keys before a row is computed.
    Any number of rows may then be of a slot, and kernels of the step may write the batch.
    """
    rows, width = qkv.shape
    block_size, kv_heads, head_dim = cache.block_size, cache.kv_heads, cache.head_dim
    num_heads = width // head_dim - 2 * kv_heads
    rotary_dim = rotary_table.shape[1]
    assert _refuses_sizes(head_dim, rotary_dim, (num_heads, kv_heads), block_size, name_dtype(qkv.dtype)) is None
    assert qkv.is_contiguous() and cache.cells.is_contiguous() and rotary_table.is_contiguous()
    assert cache.dtype in (qkv.dtype, FP8) and rotary_table.dtype == torch.float32
    is_fp8 = cache.dtype == FP8
    group = num_heads // kv_heads
    config = choose_attention_config((_ORDERED_ROWS if ordered else rows) * kv_heads, group)
    config = config.halve_tiles() if is_fp8 else config
    sizes, flags = (group, head_dim, rotary_dim, kv_heads, block_size), (head_norm is not None, is_fp8)
    out = new_rows(qkv, rows, num_heads * head_dim, hi_lo=hi_lo is not None)
    arguments = _make_arguments(qkv, cache, batch, rotary_table, (head_norm, kv_scales), out)
    if stored:
        store = compile_kernel(f"blink::store_heads<{_list_names(*sizes, *flags)}>")
        launch(store, (-(-kv_heads // _STORED_HEADS), rows), 32 * _STORED_HEADS, arguments)
    split = (config.cluster, config.warps, config.stages)
    names = _list_names(*sizes, *split, *flags, batch.has_siblings and not stored)
    launch(
        compile_kernel(f"blink::attend<{names}, {name_order(hi_lo)}" + (", true>" if stored else ">")),
        (kv_heads * config.cluster, rows),
        32 * config.warps,
        arguments,
        cluster=config.cluster,
        shared_bytes=config.shared_bytes(group, head_dim, cache.dtype.itemsize),
    )
    return out


def _list_names(*values: int) -> str:
    """Return numbers and flags as arguments of a template."""
    return ", ".join(map(str, values)).replace("True", "true").replace("False", "false")


def _make_arguments(
    qkv: Tensor,
    cache: LayerCache,
    batch: Batch,
    rotary_table: Tensor,
    heads: tuple[HeadNorm | None, KvScales],
    out: Tensor,
) -> bytes:
    norm, scales = heads
    return args(
        "AttentionArgs",
        cells=encode_cells(cache, TILE_KEYS),
        qkv=qkv,
        cache=cache.cells,
        values=cache.values_offset,
        block_tables=batch.block_tables,
        row_slots=batch.row_slots,
        context_lens=batch.context_lens,
        positions=batch.positions,
        kv_slots=batch.kv_slots,
        rotary=rotary_table,
        query_norm=norm.query_weight if norm else None,
        key_norm=norm.key_weight if norm else None,
        out=out,
        eps=norm.eps if norm else 0.0,
        scale=math.log2(math.e) / math.sqrt(cache.head_dim) * scales.key,
        key_rate=1 / scales.key,
        value_rate=1 / scales.value,
        value_scale=scales.value,
        table_stride=batch.block_tables.stride(0),
    )
