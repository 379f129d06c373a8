# SPDX-License-Identifier: Apache-2.0
"""Latent attention in a step's layers, between two projections. What layers share is planned once per step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from blink.kernels.latent import (
    LatentPlan,
    MixLatents,
    absorb_and_store,
    expand,
    latent_attention,
    plan_latent_attention,
)
from blink.kernels.operands import LATENT_EPS, ExpandedSizes, LatentSizes
from blink.kernels.rms_norm import rms_norm
from blink.models.latent import Latent
from blink.models.layers import Attention
from blink.runner.step import Step


def prepare_latents(step: Step) -> Callable[[Tensor, int], Tensor]:
    """Return what attends in each layer whose attention is latent, from its first projection."""
    model, batch, tokens = step.model, step.batch, step.bucket.tokens
    rotations = [table.index_select(0, batch.positions[:tokens]) for table in model.rotary_tables]
    plans, mixings = _plan_sizes(step), _plan_forms(step)

    def attend(projected: Tensor, index: int) -> Tensor:
        mixer, weights = _attention_of(step, index), model.layers[index].latent
        assert mixer.latent is not None and weights is not None and mixer.scale is not None
        cache, scales = step.kv_cache[index], model.layers[index].attention.kv_scales
        query = _project_queries(step, projected, mixer, mixer.latent, index)
        kept = projected[:, -mixer.latent.kept :]
        rotation, slots = rotations[model.table_of[index]], batch.kv_slots[:tokens]
        mix = mixings.get(_form_of(step, index, mixer))
        if mix is not None:
            return mix(query, kept, rotation, slots, cache, weights.expansion, mixer.scale, scales)
        query = absorb_and_store(step.kernels.latent, query, kept, rotation, slots, cache, weights.expansion, scales)
        attended = latent_attention(query, cache, plans[_sizes_of(mixer)], mixer.scale, scales)
        return expand(step.kernels.latent, attended, weights.expansion)

    return attend


def _project_queries(step: Step, projected: Tensor, mixer: Attention, latent: Latent, index: int) -> Tensor:
    """Return the queries [tokens, heads, nope + rope], which may be projected a second time."""
    weights, choice = step.model.layers[index].latent, step.plan.layers[index].query
    query = projected[:, : -latent.kept]
    if latent.query_rank:
        assert weights is not None and weights.query_norm is not None and weights.query is not None
        assert choice is not None
        normed = rms_norm(query.contiguous(), weights.query_norm, LATENT_EPS)
        query = step.kernels.matmuls[choice.kernel].multiply(normed, weights.query, None)
        if step.updates is not None:
            step.updates.add(query, normed, weights.query)
    return query.unflatten(1, (mixer.heads, latent.query))


def _plan_sizes(step: Step) -> dict[LatentSizes, LatentPlan]:
    """Plan the attention of each size."""
    found: dict[LatentSizes, LatentPlan] = {}
    for index, layer in enumerate(step.model.spec.layers):
        mixer = layer.mixer.attention
        if mixer is None or mixer.latent is None or _form_of(step, index, mixer)[0] in step.kernels.latent.forms:
            continue
        if _sizes_of(mixer) not in found:
            sizes, cache = _sizes_of(mixer), step.kv_cache[index]
            counts = step.bucket.tokens, step.bucket.rows
            kernels, dtype = step.kernels.latent, step.model.dtype
            found[sizes] = plan_latent_attention(kernels, step.batch, *counts, sizes, cache, dtype)
    return found


def _plan_forms(step: Step) -> dict[tuple[str, ExpandedSizes], MixLatents]:
    """Plan the mixing of each size whose form is another."""
    found: dict[tuple[str, ExpandedSizes], MixLatents] = {}
    for index, layer in enumerate(step.model.spec.layers):
        mixer = layer.mixer.attention
        if mixer is None or mixer.latent is None:
            continue
        form = name, sizes = _form_of(step, index, mixer)
        if name in step.kernels.latent.forms and form not in found:
            counts, cache = (step.bucket.tokens, step.bucket.rows), step.kv_cache[index]
            found[form] = step.kernels.latent.forms[name](step.batch, *counts, sizes, cache, step.model.dtype)
    return found


def _form_of(step: Step, index: int, mixer: Attention) -> tuple[str, ExpandedSizes]:
    """Return the name of a layer's kernel and what its plan depends on."""
    assert mixer.latent is not None
    sizes = ExpandedSizes(_sizes_of(mixer), mixer.latent.nope, mixer.latent.value)
    return step.plan.layers[index].attend.kernel, sizes


def _sizes_of(mixer: Attention) -> LatentSizes:
    assert mixer.latent is not None
    return LatentSizes(mixer.heads, mixer.latent.rank, mixer.latent.rope)


def _attention_of(step: Step, index: int) -> Attention:
    mixer = step.model.spec.layers[index].mixer.attention
    assert mixer is not None
    return mixer
