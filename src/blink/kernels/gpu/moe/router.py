# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The choice of experts on the GPU, a program for each token.

With few tokens, several programs for each compute the router's logits, and the last of them chooses. Each logit is the
sum of one program: it has the same bits in every step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.kernels.router import Chosen

if TYPE_CHECKING:
    from blink.models.mlps import Router

MOST_FUSED_ROWS = 32  # that choose_of_rows() takes; more were not timed
_MOST_COUNTERS = 64
_EXPERTS_PER_PROGRAM, _DEPTH = 4, 1024
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
        **_list_sizes(router, experts, has_bias=bias is not None),
        num_warps=4 if experts > 128 else 1,
        **overlap(logits, tokens),
    )
    return ranks, weights


def choose_of_rows(x: Tensor, weight: Weight, router: Router, bias: Tensor | None) -> Chosen | None:
    """Return the experts of rows x [tokens, hidden]; weight: float32 [experts, hidden]; None: of more rows."""
    tokens, hidden = x.shape
    if tokens > MOST_FUSED_ROWS:
        return None
    matrix, experts = plain(weight), weight.shape[0]
    assert x.is_contiguous() and matrix.is_contiguous() and tokens <= _MOST_COUNTERS
    logits = matrix.new_empty(tokens, experts)
    chosen = Chosen(x.new_empty(tokens, experts), matrix.new_empty(tokens, router.top_k, dtype=torch.float32))
    programs = triton.cdiv(experts, _EXPERTS_PER_PROGRAM)
    _multiply_and_choose[(programs, tokens)](
        x,
        matrix,
        _counters(x.device),
        logits,
        matrix if bias is None else bias,
        chosen.ranks,
        chosen.weights,
        router.scale,
        HIDDEN=hidden,
        OWN=_EXPERTS_PER_PROGRAM,
        DEPTH=_DEPTH,
        **_list_sizes(router, experts, has_bias=bias is not None),
        num_warps=4,
        **overlap(x, tokens),
    )
    return chosen


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return how many programs of each token are done: zeros between kernels. Never freed: captured graphs use it."""
    return torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)


def _list_sizes(router: Router, experts: int, *, has_bias: bool) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    return {
        "EXPERTS": experts,
        "TOP_K": router.top_k,
        "GROUPS": router.groups,
        "TOP_GROUPS": router.top_groups,
        "GROUP_BEST": router.group_best,
        "IS_SIGMOID": router.score == "sigmoid",
        "HAS_BIAS": has_bias,
        "RENORMALIZE": router.renormalize,
        "BLOCK": triton.next_power_of_2(experts),
        "BLOCK_GROUPS": triton.next_power_of_2(router.groups),
        "BLOCK_MEMBERS": triton.next_power_of_2(experts // router.groups),
        "BLOCK_K": triton.next_power_of_2(router.top_k),
    }


@triton.jit
def _choose(
    logits, bias, ranks, weights, scale, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        start_pdl()
    _choose_of_token(
        tl.program_id(0).to(tl.int64), logits, bias, ranks, weights, scale, EXPERTS, TOP_K, GROUPS, TOP_GROUPS,
        GROUP_BEST, IS_SIGMOID, HAS_BIAS, RENORMALIZE, BLOCK, BLOCK_GROUPS, BLOCK_MEMBERS, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _multiply_and_choose(
    x, matrix, counters, logits, bias, ranks, weights, scale,
    HIDDEN: tl.constexpr, OWN: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute some logits of a token; who is the last of its programs chooses."""
    if PDL:
        start_pdl()
    token = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    total = tl.zeros((OWN,), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        k = start + tl.arange(0, DEPTH)
        values = tl.load(x + token * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        inside = (own < EXPERTS)[:, None] & (k < HIDDEN)[None, :]
        total += tl.sum(
            tl.load(matrix + own[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0) * values[None, :], axis=1
        )
    tl.store(logits + token * EXPERTS + own, total, mask=own < EXPERTS)
    # All threads have stored before one of them counts with release: who counts last sees what all have stored.
    tl.debug_barrier()
    if tl.atomic_add(counters + token, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counters + token, 0)
        _choose_of_token(
            token, logits, bias, ranks, weights, scale, EXPERTS, TOP_K, GROUPS, TOP_GROUPS,
            GROUP_BEST, IS_SIGMOID, HAS_BIAS, RENORMALIZE, BLOCK, BLOCK_GROUPS, BLOCK_MEMBERS, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _choose_of_token(
    token, logits, bias, ranks, weights, scale, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts."""
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
