# SPDX-License-Identifier: Apache-2.0
"""Which steps of one decoding row are one kernel, and how a decoder's weights are given to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.decode.row_step import Form, RowLayer, RowModel, RowShape, RowStep, find_form
from blink.models.layer import Layer, MoeMlp

if TYPE_CHECKING:
    from blink.models.decode_step import DecodeWeights

Steps = dict[tuple[int, int], RowStep | None]  # by where the batch and the KV cache lie


def find_step(weights: DecodeWeights, batch: Batch, kv_cache: Tensor) -> RowStep | None:
    """Return the step's kernel, which is made when it is first asked for; None if there is none.

    What is given must stay where it is.
    """
    steps, key = weights.row_steps, (batch.header.data_ptr(), kv_cache.data_ptr())
    if key not in steps:
        model = _describe(weights, kv_cache)
        steps[key] = None if model is None else RowStep(model, batch, kv_cache)
    return steps[key]


def _describe(weights: DecodeWeights, kv_cache: Tensor) -> RowModel | None:
    spec, layers, norm, lm_head = weights.spec, weights.layers, weights.norm, weights.lm_head
    forms = {_find_forms(layer) for layer in layers}
    head_form = find_form(lm_head)
    if len(forms) > 1 or head_form is None or kv_cache.dtype != torch.bfloat16 or spec.vocab_size % 8:
        return None
    form, mlp_form = forms.pop()
    if form is None or mlp_form is None or any(layer.output_bias is not None for layer in layers):
        return None
    is_mixture = bool(spec.num_experts)
    shape = RowShape(
        form=form,
        mlp_form=mlp_form,
        head_form=head_form,
        hidden=spec.hidden_size,
        width=spec.moe_intermediate_size if is_mixture else spec.intermediate_size,
        num_experts=spec.num_experts,
        top_k=spec.experts_per_token if is_mixture else 0,
        num_heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.rotary_dim,
        block_size=kv_cache.shape[3],
        head_norm=layers[0].head_norm is not None,
    )
    if not shape.fits(norm.dtype):
        return None
    rows = [_take_layer(layer) for layer in layers]
    return RowModel(
        shape, rows, norm, lm_head, weights.rotary_table, spec.rms_norm_eps, renormalize=spec.norm_topk_prob
    )


def _find_forms(layer: Layer) -> tuple[Form | None, Form | None]:
    """Return how a layer's matrices lie, and how those of its MLP; None where the kernel cannot read them."""
    mlp = layer.mlp
    products, of_mlp = {find_form(layer.qkv), find_form(layer.output)}, {find_form(mlp.gate_up), find_form(mlp.down)}
    if isinstance(mlp, MoeMlp):
        if mlp.biases or mlp.router_bias is not None or find_form(mlp.router) is not Form.BF16:
            return None, None
    else:
        products |= of_mlp
    return (products.pop() if len(products) == 1 else None, of_mlp.pop() if len(of_mlp) == 1 else None)


def _take_layer(layer: Layer) -> RowLayer:
    mlp = layer.mlp
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    router = mlp.router if isinstance(mlp, MoeMlp) else None
    assert router is None or isinstance(router, Tensor)
    return RowLayer(
        qkv=layer.qkv,
        output=layer.output,
        gate_up=mlp.gate_up,
        down=mlp.down,
        router=router,
        attention_norm=layer.attention_norm,
        mlp_norm=layer.mlp_norm,
        qkv_bias=layer.qkv_bias,
        head_norm=layer.head_norm,
    )
