# SPDX-License-Identifier: Apache-2.0
"""Latent attention between its projections: norms, rotation, the cache write, attention, and what heads make of it.

A token keeps a latent c (after its norm) and one rotated key k. Of a head, with the two parts of its query:

    scores = (q_nope Wk . c + q_rope . k) * scale;  output = (softmax(scores) c) Wv

which is attention to the head's keys Wk c and values Wv c, but reads one vector for all heads. The method is that of
"DeepSeek-V2" (https://arxiv.org/abs/2405.04434), with the projections of keys and values absorbed. Long prompts may
have keys and values made of latents instead, which takes fewer multiplications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LATENT_EPS, UNSCALED, ExpandedSizes, Expansion, KvScales, LatentSizes

AttendLatents = Callable[[Tensor, LayerCache, float, KvScales], Tensor]  # the kernel of latent_attention()
ExpandLatents = Callable[[Tensor, Expansion], Tensor]  # the kernel of expand()


class PlanLatents(Protocol):
    """Prepares the attention of one step."""

    def __call__(
        self, batch: Batch, num_tokens: int, num_rows: int, sizes: LatentSizes, cache: LayerCache, dtype: torch.dtype
    ) -> AttendLatents:
        """Return what attends in every layer of a step of so many tokens and rows; dtype: of queries."""
        ...


class StoreLatents(Protocol):
    """Writes what tokens keep."""

    def __call__(
        self,
        query: Tensor,
        kept: Tensor,
        rotation: Tensor,
        kv_slots: Tensor,
        cache: LayerCache,
        expansion: Expansion,
        eps: float,
        kv_scales: KvScales,
    ) -> Tensor:
        """Compute absorb_and_store(); eps: of the norm of latents."""
        ...


# What all else of a layer's mixing is, from queries, what is kept, rotation and slots to each head's values: as
# absorb_and_store(), latent_attention() and expand() one after the other, with the scale of scores.
MixLatents = Callable[[Tensor, Tensor, Tensor, Tensor, LayerCache, Expansion, float, KvScales], Tensor]


class PlanMixing(Protocol):
    """Prepares all of it for one step, in another form."""

    def __call__(
        self, batch: Batch, num_tokens: int, num_rows: int, sizes: ExpandedSizes, cache: LayerCache, dtype: torch.dtype
    ) -> MixLatents:
        """Return what every layer of a step of so many tokens and rows calls; dtype: of queries."""
        ...


class LatentKernels(NamedTuple):
    """A device's kernels of latent attention."""

    plan: PlanLatents
    store: StoreLatents
    expand: ExpandLatents
    forms: Mapping[str, PlanMixing] = MappingProxyType({})  # other forms, by the names that plans call them


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """How one step's queries meet the cache; the same for every layer."""

    num_tokens: int
    attend: AttendLatents


def plan_latent_attention(
    kernels: LatentKernels,
    batch: Batch,
    num_tokens: int,
    num_rows: int,
    sizes: LatentSizes,
    cache: LayerCache,
    dtype: torch.dtype,
) -> LatentPlan:
    """Prepare the attention of one step of num_tokens tokens and num_rows rows, padding included; dtype: of queries."""
    return LatentPlan(num_tokens, kernels.plan(batch, num_tokens, num_rows, sizes, cache, dtype))


def absorb_and_store(
    kernels: LatentKernels,
    query: Tensor,
    kept: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    expansion: Expansion,
    kv_scales: KvScales = UNSCALED,
) -> Tensor:
    """Write what tokens keep to their slots and return the queries [tokens, heads, rank + rope] that meet it.

    query: [tokens, heads, nope + rope]; kept: [tokens, rank + rope], before norm and rotation; rotation: float32
    [tokens, rope], rows of the rotary table; kv_slots: [tokens], -1 writes nothing; cache: of the query's type, or FP8
    with kv_scales' key, which values share.
    """
    rank, rope = expansion.rank, rotation.shape[1]
    assert kept.shape == (query.shape[0], rank + rope) and cache.head_dim == rank + rope and cache.kv_heads == 1
    assert query.shape[1:] == (expansion.keys.shape[0], expansion.keys.shape[1] + rope)
    assert cache.dtype in (query.dtype, FP8) or query.device.type == "cpu"
    return kernels.store(query, kept, rotation, kv_slots, cache, expansion, LATENT_EPS, kv_scales)


def latent_attention(
    query: Tensor, cache: LayerCache, plan: LatentPlan, scale: float, kv_scales: KvScales = UNSCALED
) -> Tensor:
    """Return softmax(Q K^T * scale) of every token times the latents in its row's cache; causal; padding gives zeros.

    query: [tokens, heads, rank + rope]; result: [tokens, heads, rank].
    """
    assert query.shape[0] == plan.num_tokens and query.shape[2] == cache.head_dim
    return plan.attend(query, cache, scale, kv_scales)


def expand(kernels: LatentKernels, attended: Tensor, expansion: Expansion) -> Tensor:
    """Return each head's values of what it attended to [tokens, heads, rank]: [tokens, heads * value]."""
    return kernels.expand(attended, expansion)


def multiply_values(attended: Tensor, expansion: Expansion) -> Tensor:
    """Compute expand() by PyTorch's batched GEMM."""
    values = expansion.values
    found = attended.new_empty(len(attended), values.shape[0], values.shape[1])
    torch.bmm(attended.transpose(0, 1), values.transpose(1, 2), out=found.transpose(0, 1))
    return found.flatten(1)
