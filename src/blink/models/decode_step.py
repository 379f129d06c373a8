# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder for rows of one token each: five kernels a layer, six with a mixture of experts.

Each overlaps its neighbours. The residual is kept in one tensor, to which a layer's products add. With few rows norms
are computed by who reads it; with more, who writes it prepares them.
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
from blink.kernels.gpu.decode.moe import add_experts, can_add_experts
from blink.models.layer import DenseMlp, Layer
from blink.models.spec import ModelSpec

# What is faster with so many rows: see benchmarks/kernels/decode_layer.py.
MAX_GEMV_ROWS = 2
MAX_DECODE_ROWS = gemm.MAX_ROWS
MAX_DECODE_ROWS_OF_EXPERTS = 8  # see benchmarks/kernels/decode_moe_layer.py


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """A decoder's weights, and what its steps share."""

    spec: ModelSpec
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    rotary_table: Tensor  # float32 [positions, rotary_dim]


def can_decode(spec: ModelSpec, dtype: torch.dtype, rows: int, block_size: int) -> bool:
    """Tell whether a bucket of so many decoding rows runs on these kernels; needs a current GPU.

    block_size: tokens of a block of the KV cache.
    """
    most = MAX_DECODE_ROWS_OF_EXPERTS if spec.num_experts else MAX_DECODE_ROWS
    if rows > most or not spec.is_plain or not can_launch():
        return False
    heads = (spec.head_dim, spec.rope.rotary_dim, spec.num_heads, spec.num_kv_heads)
    can_multiply = gemv.can_multiply if _takes_gemv(spec, rows) else gemm.can_multiply
    hidden, size = spec.hidden_size, spec.intermediate_size
    weights = [(spec.q_size + 2 * spec.kv_size, hidden), (hidden, spec.q_size), (spec.vocab_size, hidden)]
    if not spec.num_experts:
        weights += [(2 * size, hidden), (hidden, size)]
    elif not can_add_experts(rows, hidden, spec.moe_intermediate_size, spec.num_experts, spec.experts_per_token, dtype):
        return False
    return can_attend(*heads, block_size, dtype) and all(can_multiply(rows, n, k, dtype) for n, k in weights)


def _takes_gemv(spec: ModelSpec, rows: int) -> bool:
    return rows <= MAX_GEMV_ROWS or spec.num_experts > 0


def compute_decode_logits(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    """Return the logits [rows, vocab] of a batch whose row r is its token r."""
    run = _decode_few if _takes_gemv(weights.spec, rows) else _decode_many
    return run(weights, batch, kv_cache, rows)


def _decode_few(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    spec, eps = weights.spec, weights.spec.rms_norm_eps
    residual = weights.embedding.index_select(0, batch.input_ids[:rows])
    for layer, cache in zip(weights.layers, kv_cache, strict=True):
        mlp = layer.mlp
        attention_norm, mlp_norm = _norms(layer)
        qkv = gemv.normed_linear(residual, attention_norm, eps, layer.qkv, layer.qkv_bias)
        attended = decode_attention(qkv, cache, batch, weights.rotary_table, layer.head_norm)
        gemv.add_linear(attended, layer.output, residual, layer.output_bias)
        if isinstance(mlp, DenseMlp):
            gemv.add_linear(gemv.gated_linear(residual, mlp_norm, eps, mlp.gate_up), mlp.down, residual)
        else:
            add_experts(
                residual, mlp_norm, eps, mlp.router, mlp.gate_up, mlp.down, batch.context_lens,
                top_k=spec.experts_per_token, renormalize=spec.norm_topk_prob,
            )  # fmt: skip
    return gemv.normed_linear(residual, weights.norm, eps, weights.lm_head)


def _decode_many(weights: DecodeWeights, batch: Batch, kv_cache: Tensor, rows: int) -> Tensor:
    eps, layers = weights.spec.rms_norm_eps, weights.layers
    next_norms = [*(_norms(layer)[0] for layer in layers[1:]), weights.norm]
    residual, normed = gemm.embed(batch.input_ids[:rows], weights.embedding, _norms(layers[0])[0])
    for layer, cache, next_norm in zip(layers, kv_cache, next_norms, strict=True):
        mlp = _dense(layer)
        qkv = gemm.normed_linear(normed, eps, layer.qkv, layer.qkv_bias)
        attended = decode_attention(qkv, cache, batch, weights.rotary_table, layer.head_norm)
        normed = gemm.add_linear(attended, layer.output, residual, _norms(layer)[1], layer.output_bias)
        gated = gemm.gated_linear(normed, eps, mlp.gate_up)
        normed = gemm.add_linear(gated, mlp.down, residual, next_norm)
    return gemm.normed_linear(normed, eps, weights.lm_head)


def _dense(layer: Layer) -> DenseMlp:
    assert isinstance(layer.mlp, DenseMlp)
    return layer.mlp


def _norms(layer: Layer) -> tuple[Tensor, Tensor]:
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    return layer.attention_norm, layer.mlp_norm
