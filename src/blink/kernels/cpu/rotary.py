# SPDX-License-Identifier: Apache-2.0
"""Rotation and the KV cache write on the CPU: natively in one pass where it can, else by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.fp8 import FP8, FP8_MAX
from blink.kernels.cpu.attention import NATIVE_CELLS
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, HeadNorm, KvScales
from blink.region.native import lib


def rotate_and_store(
    qkv: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    head_norm: HeadNorm | None = None,
    kv_scales: KvScales = UNSCALED,
) -> Tensor:
    """Compute rotate_and_store the fastest way that the operands permit."""
    is_native = qkv.dtype == torch.float32 and cache.dtype in NATIVE_CELLS and kv_slots.dtype == torch.int32
    if is_native:
        return rotate_and_store_native(qkv, rotation, kv_slots, cache, head_norm)
    return rotate_and_store_torch(qkv, rotation, kv_slots, cache, head_norm, kv_scales)


def rotate_and_store_native(
    qkv: Tensor, rotation: Tensor, kv_slots: Tensor, cache: LayerCache, head_norm: HeadNorm | None = None
) -> Tensor:
    """Compute rotate_and_store of float32 in one pass, in place; the cache has float32 or float16."""
    assert qkv.is_contiguous() and rotation.is_contiguous() and kv_slots.is_contiguous() and cache.cells.is_contiguous()
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q = heads.shape[1] - 2 * kv_heads
    is_half = cache.dtype == torch.float16
    norms = (None, None, 0.0)
    if head_norm is not None:
        norms = head_norm.query_weight.data_ptr(), head_norm.key_weight.data_ptr(), head_norm.eps
    lib.blink_rotate_and_store(
        qkv.data_ptr(), rotation.data_ptr(), kv_slots.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(),
        is_half, qkv.shape[0], num_q, kv_heads, head_dim, rotation.shape[1], *norms,
    )  # fmt: skip
    return heads[:, :num_q]


def rotate_and_store_torch(
    qkv: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    head_norm: HeadNorm | None = None,
    kv_scales: KvScales = UNSCALED,
) -> Tensor:
    """Compute rotate_and_store with plain PyTorch."""
    kv_heads = cache.kv_heads
    heads = qkv.view(qkv.shape[0], -1, cache.head_dim)
    num_q = heads.shape[1] - 2 * kv_heads
    if head_norm is not None:
        query, key = heads[:, :num_q], heads[:, num_q:-kv_heads]
        query.copy_(rms_norm_torch(query, head_norm.query_weight, head_norm.eps))
        key.copy_(rms_norm_torch(key, head_norm.key_weight, head_norm.eps))
    rotated = rotate(heads[:, :-kv_heads], rotation)
    store(rotated[:, num_q:], heads[:, -kv_heads:], kv_slots, cache, kv_scales)
    return rotated[:, :num_q]


def rotate_queries(query: Tensor, rotation: Tensor, head_dim: int, head_norm: HeadNorm | None) -> Tensor:
    """Return queries [tokens, heads * head_dim] normalised and rotated [tokens, heads, head_dim]."""
    heads = query.view(query.shape[0], -1, head_dim)
    if head_norm is not None:
        heads = rms_norm_torch(heads, head_norm.query_weight, head_norm.eps)
    return rotate(heads, rotation)


def normalize_values(qkv: Tensor, cache: LayerCache, eps: float) -> None:
    """Normalise each head of the values of qkv in place, without a weight."""
    values = qkv[:, -cache.kv_heads * cache.head_dim :].unflatten(1, (cache.kv_heads, cache.head_dim))
    wide = values.float()
    values.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the leading components of heads [tokens, heads, head_dim] (computed in float32); the others are copied."""
    half = rotation.shape[1] // 2
    cosines, sines = rotation[:, None, :half], rotation[:, None, half:]
    wide = heads.float()
    low, high = wide[..., :half], wide[..., half : 2 * half]
    rotated = torch.empty_like(wide, memory_format=torch.contiguous_format)
    torch.mul(low, cosines, out=rotated[..., :half]).addcmul_(high, sines, value=-1)
    torch.mul(high, cosines, out=rotated[..., half : 2 * half]).addcmul_(low, sines)
    if 2 * half < heads.shape[-1]:
        rotated[..., 2 * half :] = wide[..., 2 * half :]
    return rotated.to(heads.dtype)


def store(keys: Tensor, values: Tensor, kv_slots: Tensor, cache: LayerCache, kv_scales: KvScales = UNSCALED) -> None:
    """Write keys and values [tokens, kv_heads, head_dim] to their slots of the cache; slot -1 writes nothing."""
    if int(kv_slots.min()) < 0:
        kept = kv_slots >= 0
        keys, values, kv_slots = keys[kept], values[kept], kv_slots[kept]
    places = kv_slots.long()
    cells = cache.cells
    if cache.dtype == FP8:
        cells = cells.view(torch.uint8)  # which every version of PyTorch can copy by index
        keys, values = round_cells(keys, kv_scales.key), round_cells(values, kv_scales.value)
    elif cache.dtype != keys.dtype:
        keys, values = narrow_cells(keys, cache.dtype), narrow_cells(values, cache.dtype)
    slots = cells.flatten(1, 2)
    slots[0].index_copy_(0, places, keys)
    slots[1].index_copy_(0, places, values)


def narrow_cells(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the 16 bits of a cache; what is too large becomes its largest number."""
    most = torch.finfo(dtype).max
    return cells.clamp(-most, most).to(dtype)


def round_cells(cells: Tensor, scale: float) -> Tensor:
    """Return keys or values as an FP8 cache holds them, as bytes; what is too large becomes its largest number."""
    return (cells.float() * (1 / scale)).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
