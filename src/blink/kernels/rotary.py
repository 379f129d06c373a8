# SPDX-License-Identifier: Apache-2.0
"""Between the QKV projection and attention: normalise heads (Qwen 3), rotate, write keys and values to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blink.kernels.cpu import rotary as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, HeadNorm, KvScales


def make_rotary_table(
    frequencies: Sequence[float], num_positions: int, device: torch.device | str, magnitude: float = 1.0
) -> Tensor:
    """Return float32 [num_positions, rotary_dim]: the cosines of all frequencies, then their sines, times magnitude."""
    rates = torch.tensor(frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(magnitude)


def rotate_and_store(
    qkv: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    head_norm: HeadNorm | None = None,
    kv_scales: KvScales = UNSCALED,
    *,
    value_eps: float | None = None,
    has_keys: bool = True,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots and return the queries [tokens, heads, head_dim].

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], which may be overwritten; rotation: float32 [tokens, rotary_dim],
    rows of the rotary table at the tokens' positions; kv_slots: [tokens], -1 writes nothing;
    cache: of qkv's type, or FP8 with kv_scales; value_eps: of a norm of each head of values that has no weight, None:
    they have none; has_keys: whether there are keys and values, else qkv is queries alone and nothing is written.
    """
    assert qkv.ndim == 2
    assert has_keys or value_eps is None
    assert qkv.shape[1] % cache.head_dim == 0
    assert rotation.shape[0] == kv_slots.shape[0] == qkv.shape[0]
    assert rotation.shape[1] <= cache.head_dim
    if qkv.is_cuda:
        from blink.kernels.gpu import rotary as gpu

        return gpu.rotate_and_store(
            qkv, rotation, kv_slots, cache, head_norm, kv_scales, value_eps=value_eps, has_keys=has_keys
        )
    if not has_keys:
        return cpu.rotate_queries(qkv, rotation, cache.head_dim, head_norm)
    if value_eps is not None:
        cpu.normalize_values(qkv, cache, value_eps)
    return cpu.rotate_and_store(qkv, rotation, kv_slots, cache, head_norm, kv_scales)
