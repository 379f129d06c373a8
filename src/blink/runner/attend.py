# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's layers, from the QKV projection on. What layers share is planned once per step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.rms_norm import rms_norm_columns
from blink.kernels.rotary import rotate_and_store
from blink.runner.devices import DeviceCode
from blink.runner.step import Step

Attend = Callable[[Tensor, int], Tensor]  # from QKV [tokens, ...] of the layer of an index


def make_attention(step: Step, layers: range, code: DeviceCode) -> Attend:
    """Return what attends in each of some layers, by the kernel of its plan."""
    kernels = {index: code.attentions.get(step.plan.layers[index].attend.kernel) for index in layers}
    attend_paged = _prepare(step) if None in kernels.values() else None

    def attend(qkv: Tensor, index: int) -> Tensor:
        kernel = kernels[index]
        if kernel is not None:
            return kernel(step, qkv, index)
        assert attend_paged is not None
        return attend_paged(qkv, index)

    return attend


def _prepare(step: Step) -> Attend:
    """Return what attends in each layer that rotates and stores by a kernel of its own."""
    model, batch, tokens = step.model, step.batch, step.bucket.tokens
    positions, kv_slots = batch.positions[:tokens], batch.kv_slots[:tokens]
    rotations = [table.index_select(0, positions) for table in model.rotary_tables]
    plan = plan_attention(batch, tokens, step.bucket.rows, model.attentions, step.kv_cache[0], model.dtype)

    def attend(qkv: Tensor, index: int) -> Tensor:
        layer, cache, rotation = model.layers[index], step.kv_cache[index], rotations[model.table_of[index]]
        _normalize_all_heads(step, qkv, index)
        query = rotate_and_store(qkv, rotation, kv_slots, cache, layer.head_norm, layer.attention.kv_scales)
        return paged_attention(query, cache, plan, layer.attention)

    return attend


def _normalize_all_heads(step: Step, qkv: Tensor, index: int) -> None:
    """Apply the norm over all query heads and that over all key heads, where a layer has them."""
    norm, mixer = step.model.layers[index].wide_norm, step.model.spec.layers[index].mixer
    if norm is not None:
        rms_norm_columns(qkv, slice(0, mixer.q_size), norm.query_weight, norm.eps)
        rms_norm_columns(qkv, slice(mixer.q_size, mixer.q_size + mixer.kv_size), norm.key_weight, norm.eps)
