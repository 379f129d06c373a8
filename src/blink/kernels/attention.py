# SPDX-License-Identifier: Apache-2.0
"""Attention of a ragged batch over the paged KV cache. What all layers share is planned once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.cpu import attention as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions

if TYPE_CHECKING:
    from blink.models.layers import Attention


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's queries meet the cache; the same for every layer."""

    num_tokens: int
    attend: Callable[[Tensor, LayerCache, AttentionOptions], Tensor]


def plan_attention(
    batch: Batch,
    num_tokens: int,
    num_rows: int,
    attentions: Sequence[Attention],
    cache: LayerCache,
    dtype: torch.dtype | None = None,
    *,
    deterministic: bool = False,
) -> AttentionPlan:
    """Prepare the attention of one step of num_tokens tokens and num_rows rows, padding included.

    attentions: the different ones of all layers, of the same heads; cache: any layer's; dtype: of the queries, None:
    the cache's; deterministic: a token has the same bits in any step, on a CPU as tokens of prompts attend one by one.
    """
    dtype = dtype or cache.dtype
    if cache.device.type == "cuda":
        from blink.kernels.gpu.attention import invariant, paged, plan

        if deterministic:
            same = invariant.plan_attention(batch, num_tokens, num_rows, attentions, cache)
            return AttentionPlan(
                num_tokens, lambda query, cache, options: invariant.paged_attention(query, cache, same, options)
            )
        planned = plan.plan_attention(batch, num_tokens, num_rows, attentions, cache, dtype)
        return AttentionPlan(
            num_tokens, lambda query, cache, options: paged.paged_attention(query, cache, planned, options)
        )
    groups = cpu.plan_attention(batch, num_tokens, cache.block_size, dtype, by_token=deterministic)
    return AttentionPlan(num_tokens, lambda query, cache, options: cpu.paged_attention(query, cache, groups, options))


def paged_attention(
    query: Tensor, cache: LayerCache, plan: AttentionPlan, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """Return softmax(Q K^T * scale) V of every token over its row's cache; causal; padding gives zeros.

    query: [tokens, heads, head_dim]; cache: of the query's type or FP8, on a CPU of any; result: [tokens, heads *
    head_dim].
    """
    assert query.shape[0] == plan.num_tokens
    assert query.shape[2] == cache.head_dim
    assert query.shape[1] % cache.kv_heads == 0
    assert cache.dtype in (query.dtype, FP8) or query.device.type == "cpu"
    assert options.sinks is None or options.sinks.shape == query.shape[1:2]
    return plan.attend(query, cache, options)
