# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""Routing on the GPU: each expert's program finds the tokens that chose it, in their order.

For few tokens it looks at their logits itself, in one kernel. For many that would be the square of the experts' number
for each token, so another kernel chooses first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.pdl import overlap, start_pdl

_TOKENS = 32
_FEW_TOKENS = 128
_CHOOSING_TOKENS = 16  # of a program
_SEARCHED_PAIRS = 4096  # at once


class Routes(NamedTuple):
    """Which tokens each expert treats. Pair token * top_k + rank is a token's choice of its expert at that rank."""

    weights: Tensor  # float32 [tokens * top_k], probability of each pair's expert
    pairs: Tensor  # int32 [experts, tokens]; each expert's pairs, the first counts[expert]
    counts: Tensor  # int32 [experts]

    def take(self, first: int, count: int) -> Routes:
        """Return those of some experts, of which one is the first; pairs of others keep their weights."""
        return Routes(self.weights, self.pairs[first : first + count], self.counts[first : first + count])


def route(router_logits: Tensor, num_tokens: Tensor, top_k: int) -> Routes:
    """Rank each token's experts, of equals the lowest first. Tokens beyond num_tokens (int32 [1]) choose none."""
    assert router_logits.is_contiguous()
    max_tokens, num_experts = router_logits.shape
    routes = allocate_routes(router_logits, top_k)
    if max_tokens > _FEW_TOKENS:
        _route_many(router_logits, num_tokens, routes, top_k)
        return routes
    block = max(_TOKENS, triton.next_power_of_2(max_tokens))
    _route[(num_experts,)](
        router_logits,
        num_tokens,
        routes,
        max_tokens,
        num_experts,
        TOP_K=top_k,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOKENS_BLOCK=block,
        num_warps=8,
        **overlap(router_logits, max_tokens),
    )
    return routes


def _route_many(router_logits: Tensor, num_tokens: Tensor, routes: Routes, top_k: int) -> None:
    max_tokens, num_experts = router_logits.shape
    choices = router_logits.new_empty(max_tokens * top_k, dtype=torch.int32)
    _choose_experts[(triton.cdiv(max_tokens, _CHOOSING_TOKENS),)](
        router_logits,
        num_tokens,
        choices,
        routes.weights,
        max_tokens,
        num_experts,
        TOP_K=top_k,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOKENS_BLOCK=_CHOOSING_TOKENS,
        num_warps=4,
    )
    _find_pairs[(num_experts,)](
        choices,
        num_tokens,
        routes.pairs,
        routes.counts,
        max_tokens,
        TOP_K=top_k,
        PAIRS_BLOCK=_SEARCHED_PAIRS,
        num_warps=8,
    )


def allocate_routes(router_logits: Tensor, top_k: int, places: int | None = None) -> Routes:
    """Allocate what collect_pairs() fills; places: for pairs of an expert, if not just as many as tokens."""
    max_tokens, num_experts = router_logits.shape
    return Routes(
        weights=router_logits.new_empty(max_tokens * top_k, dtype=torch.float32),
        pairs=router_logits.new_empty(num_experts, places or max_tokens, dtype=torch.int32),
        counts=router_logits.new_empty(num_experts, dtype=torch.int32),
    )


@triton.jit
def _route(
    router_logits,
    num_tokens,
    routes,
    max_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        start_pdl()
    collect_pairs(
        tl.program_id(0), router_logits, num_tokens, routes, max_tokens, num_experts, TOP_K, EXPERTS_BLOCK, TOKENS_BLOCK
    )


@triton.jit
def collect_pairs(
    expert,
    router_logits,
    num_tokens,
    routes,
    max_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
):
    """Collect one expert's pairs and store their weights."""
    limit = tl.minimum(tl.load(num_tokens), max_tokens)
    count = 0
    for start in range(0, limit, TOKENS_BLOCK):
        pair, weight, chosen = _choose_tokens(
            expert, start, limit, router_logits, max_tokens, num_experts, TOP_K, EXPERTS_BLOCK, TOKENS_BLOCK
        )
        tl.store(routes.weights + pair, weight, mask=chosen)
        found = chosen.to(tl.int32)
        tl.store(routes.pairs + expert * max_tokens + count + tl.cumsum(found, axis=0) - 1, pair, mask=chosen)
        count += tl.sum(found, axis=0)
    tl.store(routes.counts + expert, count)


@triton.jit
def _choose_tokens(
    expert,
    start,
    limit,
    router_logits,
    max_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
):
    """Return the pairs of some tokens from start on with an expert, their weights, and which below limit chose it.

    What is loaded does not hang on limit, so nothing waits for it.
    """
    other = tl.arange(0, EXPERTS_BLOCK)[None, :]
    token = start + tl.arange(0, TOKENS_BLOCK)
    inside = (token[:, None] < max_tokens) & (other < num_experts)
    place = token[:, None] * num_experts + other
    logits = tl.load(router_logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    mine = tl.load(router_logits + token * num_experts + expert, mask=token < max_tokens, other=0.0).to(tl.float32)
    # NaN ranks last: a row of it would else choose all experts, which is more than there is room for.
    others = tl.where(logits == logits, logits, float("-inf"))
    own = tl.where(mine == mine, mine, float("-inf"))[:, None]
    ahead = (others > own) | ((others == own) & (other < expert))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    largest = tl.where(token < limit, tl.max(logits, axis=1), 0.0)
    mass = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    chosen = (rank < TOP_K) & (token < limit)
    return token * TOP_K + rank, tl.math.div_rn(tl.exp(mine - largest), mass), chosen


@triton.jit
def _choose_experts(
    router_logits,
    num_tokens,
    choices,
    weights,
    max_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
):
    """Write some tokens' experts by rank, and their weights; as _choose_tokens() ranks them."""
    expert = tl.arange(0, EXPERTS_BLOCK)[None, :]
    token = tl.program_id(0) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    exists = token < tl.minimum(tl.load(num_tokens), max_tokens)
    inside = exists[:, None] & (expert < num_experts)
    logits = tl.load(router_logits + token[:, None] * num_experts + expert, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    largest = tl.where(exists, tl.max(logits, axis=1), 0.0)
    mass = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    left = tl.where(logits == logits, logits, float("-inf"))  # NaN ranks last
    taken = tl.broadcast_to(expert >= num_experts, logits.shape)
    for rank in tl.static_range(TOP_K):
        best = tl.max(tl.where(taken, float("-inf"), left), axis=1)
        equal = (left == best[:, None]) & (taken == 0)
        choice = tl.min(tl.where(equal, expert, EXPERTS_BLOCK), axis=1)
        own = tl.sum(tl.where(expert == choice[:, None], logits, 0.0), axis=1)
        pair = token * TOP_K + rank
        tl.store(choices + pair, choice, mask=exists)
        tl.store(weights + pair, tl.math.div_rn(tl.exp(own - largest), mass), mask=exists)
        taken = taken | (expert == choice[:, None])


@triton.jit
def _find_pairs(choices, num_tokens, pairs, counts, max_tokens, TOP_K: tl.constexpr, PAIRS_BLOCK: tl.constexpr):
    """Collect the pairs of the program's expert, in their order."""
    expert = tl.program_id(0)
    limit = tl.minimum(tl.load(num_tokens), max_tokens) * TOP_K
    count = 0
    for start in range(0, limit, PAIRS_BLOCK):
        pair = start + tl.arange(0, PAIRS_BLOCK)
        chosen = tl.load(choices + pair, mask=pair < limit, other=-1) == expert
        found = chosen.to(tl.int32)
        tl.store(pairs + expert * max_tokens + count + tl.cumsum(found, axis=0) - 1, pair, mask=chosen)
        count += tl.sum(found, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def find_tile(counts, num_experts, ROWS_BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    """Return this program's expert (num_experts: none), its first row among the expert's pairs, and their count."""
    tile = tl.program_id(0)
    index = tl.arange(0, EXPERTS_BLOCK)
    sizes = tl.load(counts + index, mask=index < num_experts, other=0)
    tiles = (sizes + ROWS_BLOCK - 1) // ROWS_BLOCK
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((ends <= tile) & (index < num_experts)).to(tl.int32), axis=0)
    first = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(index == expert, sizes, 0), axis=0)
    return expert, (tile - first) * ROWS_BLOCK, count
