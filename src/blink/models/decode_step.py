# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder for a few rows of one token each: five kernels a layer, six with a mixture of experts.

Each overlaps its neighbours. The residual is kept in one tensor, to which a layer's products add; norms are computed
by who reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.decode.attention import can_attend, decode_attention
from blink.kernels.gpu.decode.gemv import add_linear, can_multiply, gated_linear, normed_linear
from blink.kernels.gpu.decode.launch import can_launch
from blink.kernels.gpu.decode.moe import add_experts, can_add_experts
from blink.models.layer import DenseMlp, Layer
from blink.models.spec import ModelSpec

# With more rows cuBLAS is as fast: see benchmarks/kernels/decode_layer.py.
MAX_DECODE_ROWS = 4
MAX_DECODE_ROWS_OF_EXPERTS = 8


def can_decode(spec: ModelSpec, dtype: torch.dtype, rows: int) -> bool:
    """Tell whether a bucket of so many decoding rows runs on these kernels; needs a current GPU."""
    most = MAX_DECODE_ROWS_OF_EXPERTS if spec.num_experts else MAX_DECODE_ROWS
    if rows > most or not can_launch():
        return False
    hidden = spec.hidden_size
    weights = ((spec.q_size + 2 * spec.kv_size, hidden), (hidden, spec.q_size), (spec.vocab_size, hidden))
    return (
        can_attend(spec.head_dim, spec.rope.rotary_dim, spec.num_heads, spec.num_kv_heads, dtype)
        and all(can_multiply(rows, n, k, dtype) for n, k in weights)
        and _can_run_mlp(spec, dtype, rows)
    )


def _can_run_mlp(spec: ModelSpec, dtype: torch.dtype, rows: int) -> bool:
    hidden, size = spec.hidden_size, spec.intermediate_size
    if spec.num_experts:
        size = spec.moe_intermediate_size
        return can_add_experts(rows, hidden, size, spec.num_experts, spec.experts_per_token, dtype)
    return can_multiply(rows, 2 * size, hidden, dtype) and can_multiply(rows, hidden, size, dtype)


def run_decode_layer(
    spec: ModelSpec, layer: Layer, residual: Tensor, kv_cache: Tensor, batch: Batch, rotary_table: Tensor
) -> None:
    """Run one layer on residual [rows, hidden], in place; row r is the batch's token r."""
    eps, mlp = spec.rms_norm_eps, layer.mlp
    qkv = normed_linear(residual, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
    attended = decode_attention(qkv, kv_cache, batch, rotary_table, layer.head_norm)
    add_linear(attended, layer.output, residual, layer.output_bias)
    if isinstance(mlp, DenseMlp):
        add_linear(gated_linear(residual, layer.mlp_norm, eps, mlp.gate_up), mlp.down, residual)
        return
    add_experts(
        residual, layer.mlp_norm, eps, mlp.router, mlp.gate_up, mlp.down, batch.context_lens,
        top_k=spec.experts_per_token, renormalize=spec.norm_topk_prob,
    )  # fmt: skip


def compute_decode_logits(residual: Tensor, norm: Tensor, eps: float, lm_head: Tensor) -> Tensor:
    """Return the logits [rows, vocab] of the last layer's residual."""
    return normed_linear(residual, norm, eps, lm_head)
