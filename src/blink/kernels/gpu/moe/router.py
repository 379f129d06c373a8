# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The choice of experts on the GPU, a program for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from blink.models.mlps import Router

_NO_SUM = tl.constexpr(1e-20)  # is added to sums, which else might be 0


def choose_experts(logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ranks and weights as kernels/router.py has them; of equal scores the lowest expert's is the largest."""
    tokens, experts = logits.shape
    ranks = logits.new_empty(tokens, experts, dtype=dtype)
    weights = logits.new_empty(tokens, router.top_k)
    _choose[(tokens,)](
        logits,
        logits if bias is None else bias,
        ranks,
        weights,
        router.scale,
        EXPERTS=experts,
        TOP_K=router.top_k,
        GROUPS=router.groups,
        TOP_GROUPS=router.top_groups,
        GROUP_BEST=router.group_best,
        IS_SIGMOID=router.score == "sigmoid",
        HAS_BIAS=bias is not None,
        RENORMALIZE=router.renormalize,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_GROUPS=triton.next_power_of_2(router.groups),
        BLOCK_MEMBERS=triton.next_power_of_2(experts // router.groups),
        BLOCK_K=triton.next_power_of_2(router.top_k),
        num_warps=4 if experts > 128 else 1,
    )
    return ranks, weights


@triton.jit
def _choose(
    logits, bias, ranks, weights, scale, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    source = logits + token * EXPERTS
    largest, mass = 0.0, 1.0
    if not IS_SIGMOID:
        whole = tl.load(source + expert, mask=expert < EXPERTS, other=float("-inf"))
        largest = tl.max(whole, axis=0)
        mass = tl.sum(tl.exp(whole - largest), axis=0)
    score, choice = _score(source, bias, expert, expert < EXPERTS, largest, mass, IS_SIGMOID, HAS_BIAS)
    if GROUPS > 1:
        size: tl.constexpr = EXPERTS // GROUPS
        group, member = tl.arange(0, BLOCK_GROUPS)[:, None], tl.arange(0, BLOCK_MEMBERS)[None, :]
        inside = (group < GROUPS) & (member < size)
        _, members = _score(source, bias, group * size + member, inside, largest, mass, IS_SIGMOID, HAS_BIAS)
        choice = _keep_groups(choice, members, expert // size, GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK_GROUPS)
    rank = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    for turn in tl.static_range(TOP_K):
        taken = expert == tl.argmax(choice, axis=0)
        rank = tl.where(taken, 0.0 - turn, rank)
        chosen = tl.where(place == turn, tl.sum(tl.where(taken, score, 0.0), axis=0), chosen)
        choice = tl.where(taken, float("-inf"), choice)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, axis=0) + _NO_SUM)
    tl.store(weights + token * TOP_K + place, chosen * scale, mask=place < TOP_K)
    tl.store(ranks + token * EXPERTS + expert, rank.to(ranks.dtype.element_ty), mask=expert < EXPERTS)


@triton.jit
def _score(
    source, bias, places, inside, largest, mass, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Return some experts' scores, and these as they count for the choice: minus infinity outside."""
    logits = tl.load(source + places, mask=inside, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logits)) if IS_SIGMOID else tl.exp(logits - largest) / mass
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + places, mask=inside, other=0.0)
    return score, tl.where(inside & (choice == choice), choice, float("-inf"))


@triton.jit
def _keep_groups(
    choice, members, group_of, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the choice with minus infinity outside of the best groups; members: the same, a row for each group."""
    group = tl.arange(0, BLOCK_GROUPS)
    column = tl.arange(0, members.shape[1])[None, :]
    total = tl.zeros([BLOCK_GROUPS], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        total += tl.max(members, axis=1)
        members = tl.where(column == tl.argmax(members, axis=1)[:, None], float("-inf"), members)
    total = tl.where(group < GROUPS, total, float("-inf"))
    is_kept = tl.zeros(choice.shape, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        found = tl.argmax(total, axis=0)
        is_kept = tl.where(group_of == found, 1, is_kept)
        total = tl.where(group == found, float("-inf"), total)
    return tl.where(is_kept > 0, choice, float("-inf"))
