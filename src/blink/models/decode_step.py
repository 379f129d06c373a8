# SPDX-License-Identifier: Apache-2.0
"""One step of a dense decoder for rows of one token each: five kernels a layer, each overlapping its neighbours.

The residual is kept in one tensor, to which both products of a layer add. With few rows norms are computed by who
reads it; with more, who writes it prepares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.decode import gemm, gemv
from blink.kernels.gpu.decode.attention import can_attend, decode_attention
from blink.kernels.gpu.decode.launch import can_launch
from blink.models.layer import DenseMlp, Layer
from blink.models.spec import ModelSpec

# What is faster with so many rows: see benchmarks/kernels/decode_layer.py.
MAX_GEMV_ROWS = 2
MAX_DECODE_ROWS = gemm.MAX_ROWS


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """A dense decoder's weights, and what its steps share."""

    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    rotary_table: Tensor  # float32 [positions, rotary_dim]
    eps: float


def can_decode(spec: ModelSpec, dtype: torch.dtype, rows: int, block_size: int) -> bool:
    """Tell whether a bucket of so many decoding rows runs on these kernels; needs a current GPU.

    block_size: tokens of a block of the KV cache.
    """
    if spec.num_experts or rows > MAX_DECODE_ROWS or not can_launch():
        return False
    hidden = spec.hidden_size
    weights = (
        (spec.q_size + 2 * spec.kv_size, hidden),
        (hidden, spec.q_size),
        (2 * spec.intermediate_size, hidden),
        (hidden, spec.intermediate_size),
        (spec.vocab_size, hidden),
    )
    can_multiply = gemv.can_multiply if rows <= MAX_GEMV_ROWS else gemm.can_multiply
    heads = (spec.head_dim, spec.rope.rotary_dim, spec.num_heads, spec.num_kv_heads)
    return can_attend(*heads, block_size, dtype) and all(can_multiply(rows, n, k, dtype) for n, k in weights)


def compute_decode_logits(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    """Return the logits [rows, vocab] of a batch whose row r is its token r."""
    run = _decode_few if rows <= MAX_GEMV_ROWS else _decode_many
    return run(weights, batch, kv_cache, rows)


def _decode_few(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    eps = weights.eps
    residual = weights.embedding.index_select(0, batch.input_ids[:rows])
    for layer, cache in zip(weights.layers, kv_cache, strict=True):
        mlp = _dense(layer)
        qkv = gemv.normed_linear(residual, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
        attended = decode_attention(qkv, cache, batch, weights.rotary_table, layer.head_norm)
        gemv.add_linear(attended, layer.output, residual, layer.output_bias)
        gemv.add_linear(gemv.gated_linear(residual, layer.mlp_norm, eps, mlp.gate_up), mlp.down, residual)
    return gemv.normed_linear(residual, weights.norm, eps, weights.lm_head)


def _decode_many(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    eps, layers = weights.eps, weights.layers
    next_norms = [*(layer.attention_norm for layer in layers[1:]), weights.norm]
    residual, normed = gemm.embed(batch.input_ids[:rows], weights.embedding, layers[0].attention_norm)
    for layer, cache, next_norm in zip(layers, kv_cache, next_norms, strict=True):
        mlp = _dense(layer)
        qkv = gemm.normed_linear(normed, eps, layer.qkv, layer.qkv_bias)
        attended = decode_attention(qkv, cache, batch, weights.rotary_table, layer.head_norm)
        normed = gemm.add_linear(attended, layer.output, residual, layer.mlp_norm, layer.output_bias)
        gated = gemm.gated_linear(normed, eps, mlp.gate_up)
        normed = gemm.add_linear(gated, mlp.down, residual, next_norm)
    return gemm.normed_linear(normed, eps, weights.lm_head)


def _dense(layer: Layer) -> DenseMlp:
    assert isinstance(layer.mlp, DenseMlp)
    return layer.mlp
