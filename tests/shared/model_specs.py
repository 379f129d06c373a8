# SPDX-License-Identifier: Apache-2.0
"""Specs of small models by the usual few numbers, and KV caches as tests fill and compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blink.kernels.layer_cache import KvCache, LayerCache
from blink.models.layers import Attention, LayerSpec
from blink.models.mlps import DenseMlp, MoeMlp
from blink.models.rope import Rope
from blink.models.spec import ModelSpec


def make_attention(heads: int, kv_heads: int, head_dim: int, **options: Any) -> Attention:
    rope = Rope(theta=10000.0, rotary_dim=head_dim)
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, **options)


def attention_of(layer: LayerSpec) -> Attention:
    assert layer.mixer.attention is not None
    return layer.mixer.attention


def make_spec(
    architecture: str,
    mixer: Attention,
    mlp: DenseMlp | MoeMlp,
    *,
    num_layers: int,
    vocab_size: int = 1000,
    hidden_size: int = 512,
    rms_norm_eps: float = 1e-6,
    max_model_len: int = 512,
) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(LayerSpec(mixer=mixer, mlp=mlp),) * num_layers,
        rms_norm_eps=rms_norm_eps,
        max_model_len=max_model_len,
    )


def fill_cache(cache: KvCache, generator: torch.Generator | None = None) -> KvCache:
    for layer in cache:
        layer.cells.normal_(generator=generator)
    return cache


def clone_cache(cache: KvCache) -> KvCache:
    return KvCache({index: LayerCache(layer.cells.clone()) for index, layer in enumerate(cache)})


def stack_cache(cache: KvCache) -> Tensor:
    """Return a copy of the cells of layers that have some [layers, 2, num_blocks, block_size, kv_heads, head_dim]."""
    return torch.stack([layer.cells for layer in cache])
