# SPDX-License-Identifier: Apache-2.0
"""What mixes the tokens of a sequence in a step's layers, between two projections: attention, or a recurrent rule.

What layers share is planned once per step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blink.kernels.attention import AttentionPlan, paged_attention, plan_attention
from blink.kernels.recurrent import Rows
from blink.kernels.rms_norm import rms_norm_columns
from blink.kernels.rotary import rotate_and_store
from blink.models.layers import Attention, QueryGrowth
from blink.plan.execution_plan import NormStyle
from blink.runner.devices import DeviceCode
from blink.runner.latent import prepare_latents
from blink.runner.step import Step

# From QKV [tokens, ...] of the layer of an index, and what else a recurrent one has of each token.
Attend = Callable[[Tensor, "Tensor | None", int], Tensor]


def make_attention(step: Step, layers: range, code: DeviceCode) -> Attend:
    """Return what mixes tokens in each of some layers, by the kernel of its plan."""
    recurrent = [index for index in layers if index in step.kv_cache.recurrent]
    latent = {index for index in layers if step.model.layers[index].latent is not None}
    others = {*layers}.difference(recurrent, latent)
    names = {index: step.plan.layers[index].attend.kernel for index in others}
    prepared = {name: prepare(step) for name, prepare in code.attentions.items() if name in names.values()}
    kernels = {index: prepared.get(name) for index, name in names.items()}
    attend_paged = _prepare(step) if None in kernels.values() else None
    attend_latent = prepare_latents(step) if latent else None
    advance = _prepare_rule(step, code) if recurrent else None

    def attend(qkv: Tensor, gates: Tensor | None, index: int) -> Tensor:
        if gates is not None:
            assert advance is not None
            return advance(qkv, gates, index)
        if index in latent:
            assert attend_latent is not None
            return attend_latent(qkv, index)
        kernel = kernels[index]
        if kernel is not None:
            return kernel(qkv, index)
        assert attend_paged is not None
        return attend_paged(qkv, index)

    return attend


def _prepare(step: Step) -> Callable[[Tensor, int], Tensor]:
    """Return what attends in each layer that rotates and stores by a kernel of its own."""
    model, batch, tokens = step.model, step.batch, step.bucket.tokens
    positions = batch.positions[:tokens]
    rotations = [table.index_select(0, positions) for table in model.rotary_tables]
    growths = {one.query_growth for one in model.attentions}
    factors = {growth: _grow(positions, growth, model.dtype) for growth in growths if growth is not None}
    plans = _plan_shapes(step)

    def attend(qkv: Tensor, index: int) -> Tensor:
        layer, cache, rotation = model.layers[index], step.kv_cache[index], rotations[model.table_of[index]]
        mixer = model.spec.layers[index].mixer.attention
        assert mixer is not None
        gates = None
        if mixer.output_gate:
            qkv, gates = split_gates(qkv, mixer)
        _normalize_all_heads(step, qkv, index, mixer)
        has_keys = mixer.kv_source is None
        query = rotate_and_store(
            qkv,
            rotation,
            batch.find_kv_slots(mixer.window)[:tokens],
            cache,
            layer.head_norm,
            layer.attention.kv_scales,
            value_eps=model.spec.rms_norm_eps if mixer.value_norm and has_keys else None,
            has_keys=has_keys,
        )
        if mixer.query_growth is not None:
            query = query.mul_(factors[mixer.query_growth])
        found = paged_attention(query, cache, plans[mixer.shape], layer.attention)
        return found if gates is None else found.mul_(gates)

    return attend


def _plan_shapes(step: Step) -> dict[tuple[int, int, int], AttentionPlan]:
    """Plan the attention of each shape of heads."""
    model, found = step.model, dict[tuple[int, int, int], AttentionPlan]()
    for index, layer in enumerate(model.spec.layers):
        mixer = layer.mixer.attention
        if mixer is not None and mixer.latent is None and mixer.shape not in found:
            alike = [one for one in model.attentions if one.shape == mixer.shape]
            sizes = step.bucket.tokens, step.bucket.rows
            cache, same = step.kv_cache[index], step.deterministic
            found[mixer.shape] = plan_attention(step.batch, *sizes, alike, cache, model.dtype, deterministic=same)
    return found


def _grow(positions: Tensor, growth: QueryGrowth, dtype: torch.dtype) -> Tensor:
    """Return the factor of all queries at each position [tokens, 1, 1]."""
    periods = (positions + growth.offset).div_(growth.period, rounding_mode="floor")
    return periods.float().log1p_().mul_(growth.slope).add_(1).to(dtype)[:, None, None]


def split_gates(qkv: Tensor, mixer: Attention) -> tuple[Tensor, Tensor]:
    """Return queries, keys and values without the gates behind each query, and the gates' sigmoids [tokens, q_size]."""
    pairs = qkv[:, : 2 * mixer.q_size].unflatten(1, (mixer.heads, 2, mixer.head_dim))
    gates = pairs[:, :, 1].sigmoid().flatten(1)
    return torch.cat((pairs[:, :, 0].flatten(1), qkv[:, 2 * mixer.q_size :]), dim=1), gates


def _normalize_all_heads(step: Step, qkv: Tensor, index: int, mixer: Attention) -> None:
    """Apply the norm over all query heads and that over all key heads, where a layer has them."""
    norm = step.model.layers[index].wide_norm
    if norm is not None:
        keys = slice(mixer.q_size, mixer.q_size + mixer.kv_size)
        rms_norm_columns(qkv, slice(0, mixer.q_size), norm.query_weight, norm.eps, step.merge_means)
        rms_norm_columns(qkv, keys, norm.key_weight, norm.eps, step.merge_means)


def _prepare_rule(step: Step, code: DeviceCode) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return what advances the states of each recurrent layer, from its projections."""
    rows = Rows.of(step.batch, step.bucket.rows)
    if step.plan.norms is not NormStyle.KERNEL:
        # Behind what the kernel reads before it waits: a copy, which no PDL launch overtakes.
        rows = rows._replace(starts=rows.starts.clone())

    def advance(qkvz: Tensor, gates: Tensor, index: int) -> Tensor:
        recurrent = step.model.layers[index].recurrent
        assert recurrent is not None
        kernel, rule = code.recurrences[step.plan.layers[index].attend.kernel], recurrent.rule
        mixer = step.model.spec.layers[index].mixer.recurrence
        mamba = None if mixer is None else mixer.mamba
        if mamba is not None and mamba.shares_group:
            rule = rule.merging(step.merge_means)
        return kernel(rule.project(qkvz, gates), step.kv_cache.recurrent[index], rows, rule)

    return advance
