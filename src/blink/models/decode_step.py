# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder for rows of one token each: five kernels a layer, six with a mixture of experts.

Each overlaps its neighbours. The residual is kept in one tensor, to which a layer's products add. With few rows norms
are computed by who reads it; with more, who writes it prepares them. Experts of many rows take two kernels more.
Short steps with prompts take the same products, for which a row is a token, and another attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.formats.experts import find_encoding
from blink.formats.packed import PackedWeight
from blink.formats.schemes import FP8_ROW, FormatId
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.decode import attention as attention_kernel
from blink.kernels.gpu.decode import gemm, gemv, gemv_quantized, grouped_gemm, moe
from blink.kernels.gpu.decode.attention import decode_attention
from blink.kernels.gpu.decode.grouped_moe import Mixture, add_grouped_experts
from blink.kernels.gpu.decode.launch import can_launch
from blink.kernels.gpu.decode.splits import pad_rows
from blink.kernels.layer_cache import KvCache
from blink.models.layer_weights import Attend, DenseWeights, LayerWeights, MoeWeights
from blink.models.layers import LayerSpec, Router
from blink.models.spec import ModelSpec

# What is faster with so many rows: see benchmarks/kernels/decode_layer.py.
MAX_GEMV_ROWS = 2
MAX_INT4_GEMV_ROWS = 4  # of dense layers with 4 bits throughout
MAX_INT4_ROWS_BEFORE_PLANES = 2  # of such
MAX_DECODE_ROWS = gemm.MAX_ROWS
MAX_MIXED_TOKENS = 80  # of steps with prompts: of more, cuBLAS and kernels of their own are as fast
MAX_PACKED_ROWS_WITH_EXPERTS = 64  # of more, nobody has tried them
MAX_UNGROUPED_ROWS = 8  # with experts: see benchmarks/kernels/few_experts.py
MAX_UNGROUPED_PACKED_ROWS = 2  # in blocks or 4 bits
MAX_UNGROUPED_FP8_ROWS = 1  # with a scale for each row


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """A decoder's weights, and what its steps share."""

    spec: ModelSpec
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Weight  # [vocab, hidden]
    rotary_tables: Sequence[Tensor]  # of each layer, float32 [positions, rotary_dim]


@dataclass(frozen=True, slots=True)
class Suspended:
    """What layers leave to those behind them: all that a step keeps between two of its segments, beside the batch."""

    residual: Tensor  # [rows, hidden]
    normed: gemm.Normed | None  # the next norm of it, where who writes the residual prepares that


def refuses(spec: ModelSpec, dtype: torch.dtype, rows: int, block_size: int) -> str | None:
    """Say why a bucket of so many decoding rows does not run on these kernels; None: it does. Needs a current GPU.

    block_size: tokens of a block of the KV cache.
    """
    if rows > MAX_DECODE_ROWS:
        return f"more than {MAX_DECODE_ROWS} rows"
    if options := spec.options_beyond("tie_embeddings", "quantization"):
        return options[0]
    reasons = (_refuses_layer(spec, layer, dtype, rows) for layer in spec.distinct_layers)
    return refuses_attention(spec, dtype, block_size) or next(filter(None, reasons), None)


def _refuses_layer(spec: ModelSpec, layer: LayerSpec, dtype: torch.dtype, rows: int) -> str | None:
    """Say why the kernels do not take a layer's matrices, or what it does beside them; None: they do."""
    if options := layer.options_beyond() + layer.mlp.options_beyond():
        return options[0]
    few, hidden, mlp = rows <= MAX_GEMV_ROWS, spec.hidden_size, layer.mlp.mixture
    if few and mlp and not moe.can_add_experts(rows, hidden, mlp.size, mlp.experts, mlp.router.top_k):
        return f"{mlp.experts} experts of {mlp.size}"
    weights = [*layer.mixer.matrices(hidden), *layer.mlp.matrices(hidden), (spec.vocab_size, hidden)]
    can_multiply = gemv.can_multiply if few else gemm.can_multiply
    refused = ((n, k) for n, k in weights if not can_multiply(rows, n, k, dtype))
    return next((f"a matrix of {n} x {k}" for n, k in refused), None)


def can_mix(spec: ModelSpec, dtype: torch.dtype, tokens: int, layers: Sequence[LayerWeights], block_size: int) -> bool:
    """Tell whether steps of so many tokens, with prompts, run on these kernels' products: those of dense models in 16
    bits; needs a current GPU."""
    if tokens > MAX_MIXED_TOKENS or spec.mixture is not None:
        return False
    if any(isinstance(weight, PackedWeight) for layer in layers for weight in _list_matrices(layer)):
        return False
    return refuses(spec, dtype, max(tokens, MAX_GEMV_ROWS + 1), block_size) is None


def can_multiply_packed(layers: Sequence[LayerWeights], lm_head: Weight, rows: int) -> bool:
    """Tell whether the kernels take those weights that are quantized."""
    packed = _list_packed(layers, lm_head)
    if _takes_few(layers, packed, rows):
        return True
    if packed and rows > MAX_PACKED_ROWS_WITH_EXPERTS and any(isinstance(layer.mlp, MoeWeights) for layer in layers):
        return False
    return all(gemm.can_multiply_packed(weight, rows) for weight in packed)


def _has_planes(layers: Sequence[LayerWeights], rows: int) -> bool:
    """Tell whether all products of some layers take planes."""
    return all(_takes_planes(weight, rows) for layer in layers for weight in _list_matrices(layer))


def _takes_planes(weight: Weight, rows: int) -> bool:
    is_taken = isinstance(weight, PackedWeight) and gemm.can_multiply_packed(weight, rows)
    return is_taken and gemm.order_for(weight, rows) is not None


def _list_packed(layers: Sequence[LayerWeights], lm_head: Weight) -> list[PackedWeight]:
    weights = [*(weight for layer in layers for weight in _list_matrices(layer)), lm_head]
    return [weight for weight in weights if isinstance(weight, PackedWeight)]


def _takes_few(layers: Sequence[LayerWeights], packed: Sequence[PackedWeight], rows: int) -> bool:
    """Tell whether the kernels for few rows are there and the faster ones: planes mostly are."""
    are_int4 = all(_is_int4(layer) for layer in layers)
    if _has_planes(layers, rows):
        most = MAX_INT4_ROWS_BEFORE_PLANES if are_int4 else 0
    else:
        most = MAX_INT4_GEMV_ROWS if are_int4 else MAX_GEMV_ROWS
    if rows > most or any(_is_grouped(layer, rows) for layer in layers):
        return False
    return all(gemv_quantized.can_multiply(weight, rows) for weight in packed)


def _is_int4(layer: LayerWeights) -> bool:
    """Tell whether all of a dense layer's matrices have 4 bits."""
    weights = _list_dense(layer)
    is_int4 = (isinstance(weight, PackedWeight) and weight.format is FormatId.INT4 for weight in weights)
    return bool(weights) and all(is_int4)


def _list_matrices(layer: LayerWeights) -> tuple[Weight, ...]:
    """Return the matrices of a layer but for experts and their router."""
    return _list_dense(layer) or (layer.qkv, layer.output)


def _list_dense(layer: LayerWeights) -> tuple[Weight, ...]:
    """Return the matrices of a layer without experts."""
    mlp = layer.mlp
    return (layer.qkv, layer.output, mlp.gate_up, mlp.down) if isinstance(mlp, DenseWeights) else ()


def _is_grouped(layer: LayerWeights, rows: int) -> bool:
    """Tell whether a layer's experts take the grouped products: with more rows, or if others do not take them."""
    mlp = layer.mlp
    if not isinstance(mlp, MoeWeights):
        return False
    most, encoding = MAX_UNGROUPED_ROWS, find_encoding(mlp.down)
    if encoding is not None and encoding.grouped:
        most = MAX_UNGROUPED_PACKED_ROWS
    elif encoding == FP8_ROW and grouped_gemm.can_multiply(rows, 1, mlp.gate_up, mlp.down):
        most = MAX_UNGROUPED_FP8_ROWS
    return rows > most or not moe.can_add(rows, mlp.gate_up, mlp.down)


def refuses_attention(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> str | None:
    """Say why decode_attention() does not take decoding rows, however many; None: it does. Needs a current GPU."""
    if not can_launch():
        return "no Hopper"
    reasons = (attention_kernel.refuses(layer.mixer, block_size, dtype) for layer in spec.distinct_layers)
    return next(filter(None, reasons), None)


def compute_decode_logits(weights: DecodeWeights, batch: Batch, kv_cache: KvCache, rows: int) -> Tensor:
    """Return the logits [rows, vocab] of a batch whose row r is its token r."""
    every = range(len(weights.layers))
    return compute_decode_head(weights, run_decode_layers(weights, batch, kv_cache, rows, every))


def run_decode_layers(
    weights: DecodeWeights, batch: Batch, kv_cache: KvCache, rows: int, layers: range, before: Suspended | None = None
) -> Suspended:
    """Run some layers of such a step; before: what the layers before these left, None with the first."""
    packed = _list_packed(weights.layers, weights.lm_head)
    if _takes_few(weights.layers, packed, rows):
        return _decode_few(weights, batch, kv_cache, rows, layers, before)

    def attend(qkv: Tensor, index: int) -> Tensor:
        layer, table = weights.layers[index], weights.rotary_tables[index]
        scales, planes = layer.attention.kv_scales, gemm.order_for(layer.output, rows)
        return decode_attention(qkv, kv_cache[index], batch, table, layer.head_norm, kv_scales=scales, planes=planes)

    return _run_many(weights, batch, rows, attend, layers, before)


def compute_decode_head(weights: DecodeWeights, left: Suspended) -> Tensor:
    """Return the logits [rows, vocab] from what the last layer left."""
    eps = weights.spec.rms_norm_eps
    if left.normed is None:
        return gemv.normed_linear(left.residual, weights.norm, eps, weights.lm_head)
    return gemm.normed_linear(left.normed, eps, weights.lm_head)


def _decode_few(
    weights: DecodeWeights, batch: Batch, kv_cache: KvCache, rows: int, layers: range, before: Suspended | None
) -> Suspended:
    eps = weights.spec.rms_norm_eps
    residual = before.residual if before else weights.embedding.index_select(0, batch.input_ids[:rows])
    for index in layers:
        layer, table = weights.layers[index], weights.rotary_tables[index]
        mlp = layer.mlp
        attention_norm, mlp_norm = _norms(layer)
        qkv = gemv.normed_linear(residual, attention_norm, eps, layer.qkv, layer.qkv_bias)
        scales = layer.attention.kv_scales
        attended = decode_attention(qkv, kv_cache[index], batch, table, layer.head_norm, kv_scales=scales)
        gemv.add_linear(attended, layer.output, residual, layer.output_bias)
        if isinstance(mlp, DenseWeights):
            gemv.add_linear(gemv.gated_linear(residual, mlp_norm, eps, mlp.gate_up), mlp.down, residual)
        else:
            routes = _choose(mlp.spec.router, gemv.normed_linear(residual, mlp_norm, eps, mlp.router), batch)
            gated = moe.gate_experts(residual, mlp_norm, eps, mlp.gate_up, routes)
            moe.down_experts(gated, mlp.down, routes, residual)
    return Suspended(residual, None)


def compute_mixed_states(weights: DecodeWeights, batch: Batch, tokens: int, attend: Attend) -> Tensor:
    """Return what the last norm reads of so many tokens [tokens, hidden]; can_mix() tells whether it can."""
    return _run_many(weights, batch, tokens, attend, range(len(weights.layers)), None).residual


def _run_many(
    weights: DecodeWeights,
    batch: Batch,
    rows: int,
    attend: Attend,
    layers: range,
    before: Suspended | None,
) -> Suspended:
    eps, every = weights.spec.rms_norm_eps, weights.layers
    next_norms = [*(_norms(layer)[0] for layer in every[1:]), weights.norm]
    readers = [*(layer.qkv for layer in every[1:]), weights.lm_head]  # of what each layer leaves
    packed = _list_packed(every, weights.lm_head)
    tokens = pad_rows(rows, fine=not packed and weights.spec.mixture is None)
    if before is None:
        ids, planes = batch.input_ids[:rows], gemm.order_for(every[0].qkv, rows)
        residual, normed = gemm.embed(ids, weights.embedding, _norms(every[0])[0], planes=planes, tokens=tokens)
    else:
        assert before.normed is not None
        residual, normed = before.residual, before.normed
    for index in layers:
        layer, next_norm = every[index], next_norms[index]
        mlp, mlp_norm, in_planes = layer.mlp, _norms(layer)[1], gemm.order_for(readers[index], rows)
        attended = attend(gemm.normed_linear(normed, eps, layer.qkv, layer.qkv_bias), index)
        # Routers and experts read bfloat16.
        in_mlp = gemm.order_for(mlp.gate_up, rows) if isinstance(mlp, DenseWeights) else None
        normed = gemm.add_linear(
            attended, layer.output, residual, mlp_norm, layer.output_bias, planes=in_mlp, tokens=tokens
        )
        if isinstance(mlp, DenseWeights):
            gated = gemm.gated_linear(normed, eps, mlp.gate_up, planes=gemm.order_for(mlp.down, rows))
            normed = gemm.add_linear(gated, mlp.down, residual, next_norm, planes=in_planes, tokens=tokens)
        elif not _is_grouped(layer, rows):
            routes = _choose(mlp.spec.router, gemm.normed_linear(normed, eps, mlp.router), batch)
            gated = moe.gate_experts(residual, mlp_norm, eps, mlp.gate_up, routes)
            normed = moe.down_normed_experts(gated, mlp.down, routes, residual, next_norm, planes=in_planes)
        else:
            rates = residual.new_empty(rows, dtype=torch.float32)
            logits = gemm.normed_linear(normed, eps, mlp.router, rates=rates)
            normed = add_grouped_experts(
                residual,
                normed.x,
                rates,
                logits,
                Mixture(mlp.gate_up, mlp.down, mlp.spec.router.top_k, mlp.spec.router.renormalize),
                batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1],
                next_norm,
                planes=in_planes,
            )
    return Suspended(residual, normed)


def _choose(router: Router, logits: Tensor, batch: Batch) -> moe.Routes:
    return moe.Routes(logits, batch.context_lens, router.top_k, router.renormalize)


def _norms(layer: LayerWeights) -> tuple[Tensor, Tensor]:
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    return layer.attention_norm, layer.mlp_norm
