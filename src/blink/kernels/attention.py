# SPDX-License-Identifier: Apache-2.0
"""Attention of a ragged batch over the paged KV cache. What all layers share is planned once per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.cpu import attention as cpu
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions

if TYPE_CHECKING:
    from blink.kernels.gpu.attention_plan import GpuAttentionPlan

    AttentionPlan: TypeAlias = cpu.CpuAttentionPlan | GpuAttentionPlan


def plan_attention(
    batch: Batch,
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    kv_cache: Tensor,
    dtype: torch.dtype | None = None,
    *,
    is_plain: bool = True,
) -> AttentionPlan:
    """Prepare the attention of one step of num_tokens tokens and num_rows rows, padding included.

    kv_cache: any layer's, [2, num_blocks, block_size, kv_heads, head_dim]; num_heads: query heads; dtype: of the
    queries, None: the cache's; is_plain: whether the options of all layers are.
    """
    dtype = dtype or kv_cache.dtype
    if kv_cache.is_cuda:
        from blink.kernels.gpu import attention_plan as gpu

        return gpu.plan_attention(batch, num_tokens, num_rows, num_heads, kv_cache, dtype, is_plain=is_plain)
    return cpu.plan_attention(batch, num_tokens, kv_cache.shape[2], dtype)


def paged_attention(
    query: Tensor, kv_cache: Tensor, plan: AttentionPlan, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """Return softmax(Q K^T * scale) V of every token over its row's cache; causal; padding gives zeros.

    query: [tokens, heads, head_dim]; kv_cache: [2, num_blocks, block_size, kv_heads, head_dim], of the query's type or
    FP8; result: [tokens, heads * head_dim].
    """
    assert query.shape[0] == plan.num_tokens
    assert query.shape[2] == kv_cache.shape[4]
    assert query.shape[1] % kv_cache.shape[3] == 0
    assert kv_cache.dtype in (query.dtype, FP8)
    assert options.sinks is None or options.sinks.shape == query.shape[1:2]
    if isinstance(plan, cpu.CpuAttentionPlan):
        return cpu.paged_attention(query, kv_cache, plan, options)
    from blink.kernels.gpu import attention as gpu

    return gpu.paged_attention(query, kv_cache, plan, options)
