# SPDX-License-Identifier: Apache-2.0
"""Latent attention on the CPU with PyTorch: rows of one query together, each head of longer rows by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.cpu.attention import CpuAttentionPlan, RowGroup, gather, plan_attention
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.cpu.rotary import narrow_cells, rotate, round_cells
from blink.kernels.latent import AttendLatents, LatentKernels, multiply_values
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import Expansion, KvScales, LatentSizes


def absorb_and_store(
    query: Tensor,
    kept: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    expansion: Expansion,
    eps: float,
    kv_scales: KvScales,
) -> Tensor:
    """Compute kernels/latent.py's."""
    rank, rope = expansion.rank, rotation.shape[1]
    latents, keys = kept.split([rank, rope], dim=1)
    keys = rotate(keys[:, None], rotation)[:, 0]
    _store(torch.cat((rms_norm_torch(latents, expansion.norm, eps), keys), dim=1), kv_slots, cache, kv_scales)
    nope, turning = query.split([query.shape[2] - rope, rope], dim=2)
    absorbed = torch.bmm(nope.transpose(0, 1), expansion.keys).transpose(0, 1)
    return torch.cat((absorbed, rotate(turning, rotation)), dim=2)


def _store(kept: Tensor, kv_slots: Tensor, cache: LayerCache, kv_scales: KvScales) -> None:
    is_written, cells = kv_slots >= 0, cache.keys
    kept, places = kept[is_written], kv_slots[is_written].long()
    if cache.dtype == FP8:
        kept, cells = round_cells(kept, kv_scales.key), cells.view(torch.uint8)
    elif cache.dtype != kept.dtype:
        kept = narrow_cells(kept, cache.dtype)
    cells.view(-1, cache.head_dim).index_copy_(0, places, kept)


def plan_latents(
    batch: Batch,
    num_tokens: int,
    num_rows: int,  # noqa: ARG001
    sizes: LatentSizes,
    cache: LayerCache,
    dtype: torch.dtype,
) -> AttendLatents:
    """Group the rows of a step."""
    groups = plan_attention(batch, num_tokens, cache.block_size, dtype)
    return lambda query, cache, scale, kv_scales: attend(query, cache, groups, sizes.rank, scale, kv_scales)


def attend(
    query: Tensor, cache: LayerCache, plan: CpuAttentionPlan, rank: int, scale: float, kv_scales: KvScales
) -> Tensor:
    """Gather what each group's tokens keep, then attend to it."""
    result = query.new_zeros(*query.shape[:2], rank)
    for group in plan.find_groups(0):
        tokens = slice(group.start, group.start + group.num_rows * group.num_queries)
        kept = _gather(cache, group, kv_scales, query.dtype)
        attend_rows = _attend_single if group.num_queries == 1 else _attend_long
        result[tokens] = attend_rows(query[tokens], kept, rank, group, scale)
    return result


def _gather(cache: LayerCache, group: RowGroup, kv_scales: KvScales, dtype: torch.dtype) -> Tensor:
    """Return what a group's tokens keep [num_rows, keys, rank + rope]."""
    if cache.dtype != FP8:
        return gather(cache.keys, group)[:, :, 0].to(dtype)
    found = gather(cache.keys.view(torch.uint8), group)[:, :, 0].view(FP8)
    return found.float().mul_(kv_scales.key).to(dtype)


def _attend_single(query: Tensor, kept: Tensor, rank: int, group: RowGroup, scale: float) -> Tensor:
    """Attend from rows of one query each, whose heads stand where queries of one head would."""
    mask = None if group.mask is None else group.mask.expand(-1, -1, query.shape[1], -1)
    return functional.scaled_dot_product_attention(
        query[:, None], kept[:, None], kept[:, None, :, :rank], attn_mask=mask, scale=scale
    )[:, 0]


def _attend_long(query: Tensor, kept: Tensor, rank: int, group: RowGroup, scale: float) -> Tensor:
    """Attend from a row of many queries, one head after the other: scores of all would take too much memory."""
    keys, mask = kept[:, None], group.mask
    heads = [
        functional.scaled_dot_product_attention(head[None, None], keys, keys[..., :rank], attn_mask=mask, scale=scale)[
            0, 0
        ]
        for head in query.unbind(1)
    ]
    return torch.stack(heads, dim=1)


KERNELS = LatentKernels(plan_latents, absorb_and_store, multiply_values)
