# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""A whole mixture of experts of few tokens by two kernels of GEMVs, the expert of all tokens among the others.

No rows are copied or sorted: each program finds its expert by the router's ranks. The second kernel adds up what a
token's experts give, in the order of their ranks, the one of all tokens last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from blink.formats.base import Weight, plain
from blink.formats.experts import ExpertWeights
from blink.formats.layouts import ExpertMatrices, Layout, Matrix
from blink.formats.schemes import BF16
from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.plan.site import Bucket, first_reason

if TYPE_CHECKING:
    from blink.models.mlps import MoeMlp

MOST_TOKENS = 0  # of a step that takes these kernels: none before they are timed on a GPU
_GATE_ROWS, _DOWN_ROWS, _DEPTH = 8, 4, 512  # of a program's tile of a matrix


def refuses(mlp: MoeMlp, experts: ExpertMatrices, dense: tuple[Matrix, Matrix] | None, bucket: Bucket) -> str | None:
    """Say why experts chosen by ranks are not taken, with the one of all tokens (dense); None: they are."""
    shared = () if dense is None else dense
    return first_reason(
        {
            "not timed on a GPU yet": MOST_TOKENS == 0,
            f"more than {MOST_TOKENS} tokens": bucket.tokens > MOST_TOKENS,
            "adapters": bucket.adapters,
            "another activation, biases, or some of the experts": not experts.is_plain,
            "experts in fewer bits": experts.encoding != BF16,
            "scaled inputs, or an MLP with norms of its own": mlp.scales_inputs or mlp.is_beside,
            "a gate of the expert of all tokens": mlp.shared_size > 0 and mlp.shared_gate,
            "an expert of all tokens of another size": mlp.shared_size not in (0, experts.size),
            "an expert of all tokens in fewer bits": any(matrix.layout is not Layout.ROWS for matrix in shared),
        }
    )


def describe() -> str:
    """Return the tiles in words."""
    return f"{_GATE_ROWS} x {_DEPTH} | {_DOWN_ROWS} x {_DEPTH} (by rule)"


def mix(
    x: Tensor,
    ranks: Tensor,
    weights: Tensor,
    experts: tuple[ExpertWeights, ExpertWeights],
    shared: tuple[Weight, Weight] | None,
    num_tokens: Tensor,
) -> Tensor:
    """Return the mixture of x [tokens, hidden]; ranks, weights: as kernels/router.py has them.

    experts: gate_up and down, as kernels/moe.py has them; shared: those of the expert of all tokens, if there is one;
    num_tokens: int32 [1] on the device; rows beyond it become zero.
    """
    gate_up, down = map(plain, experts)
    same = (gate_up, down) if shared is None else tuple(map(plain, shared))
    (tokens, hidden), top_k = x.shape, weights.shape[1]
    size, count = down.shape[2], top_k + (shared is not None)
    assert all(one.is_contiguous() for one in (x, ranks, weights, gate_up, down, *same))
    assert ranks.shape == (tokens, down.shape[0]) and same[1].shape[-1] == size
    inner, result = x.new_empty(tokens, count, size), x.new_empty(tokens, hidden)
    sizes = {
        "EXPERTS": down.shape[0],
        "TOP_K": top_k,
        "HIDDEN": hidden,
        "SIZE": size,
        "BLOCK_EXPERTS": triton.next_power_of_2(down.shape[0]),
        "DEPTH": _DEPTH,
        "num_warps": 4,
        **overlap(x, tokens),
    }
    _gate[(triton.cdiv(size, _GATE_ROWS), count, tokens)](
        x, ranks, gate_up, same[0], num_tokens, inner, ROWS=_GATE_ROWS, **sizes
    )
    _down[(triton.cdiv(hidden, _DOWN_ROWS), tokens)](
        inner, ranks, weights, down, same[1], num_tokens, result, COUNT=count, ROWS=_DOWN_ROWS, **sizes
    )
    return result


@triton.jit
def _find_matrix(ranks, place, matrices, shared, LENGTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
                 BLOCK_EXPERTS: tl.constexpr):  # fmt: skip
    """Return the matrix of a token's expert of a rank; behind the last rank it is the one of all tokens."""
    matrix = shared
    if place < TOP_K:
        expert = tl.arange(0, BLOCK_EXPERTS)
        rank = tl.load(ranks + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
        found = tl.argmax((rank == 0.0 - place).to(tl.int32), axis=0)
        matrix = matrices + found.to(tl.int64) * LENGTH
    return matrix


@triton.jit
def _gate(
    x, ranks, gate_up, shared, num_tokens, inner, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute SiLU(gate) * up of some of an expert's rows, for one token."""
    if PDL:
        start_pdl()
    place, token = tl.program_id(1), tl.program_id(2)
    if token >= tl.load(num_tokens):
        return
    matrix = _find_matrix(
        ranks + token * EXPERTS, place, gate_up, shared, 2 * SIZE * HIDDEN, TOP_K, EXPERTS, BLOCK_EXPERTS
    )
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gates, ups = tl.zeros([ROWS, DEPTH], tl.float32), tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        k = start + tl.arange(0, DEPTH)
        values = tl.load(x + token * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        at, inside = matrix + row[:, None] * HIDDEN + k[None, :], (row < SIZE)[:, None] & (k < HIDDEN)[None, :]
        gates += tl.load(at, mask=inside, other=0.0).to(tl.float32) * values
        ups += tl.load(at + SIZE * HIDDEN, mask=inside, other=0.0).to(tl.float32) * values
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    found = gate / (1.0 + tl.exp(-gate)) * up
    target = inner + (token * tl.num_programs(1) + place) * SIZE + row
    tl.store(target, found.to(inner.dtype.element_ty), mask=row < SIZE)


@triton.jit
def _down(
    inner, ranks, weights, down, shared, num_tokens, result, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Add up some rows of what all of a token's experts give, each times its weight."""
    if PDL:
        start_pdl()
    token, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = result + token * HIDDEN + row
    if token >= tl.load(num_tokens):
        tl.store(target, tl.zeros([ROWS], result.dtype.element_ty), mask=row < HIDDEN)
        return
    total = tl.zeros([ROWS], tl.float32)
    for place in tl.static_range(COUNT):
        matrix = _find_matrix(
            ranks + token * EXPERTS, place, down, shared, HIDDEN * SIZE, TOP_K, EXPERTS, BLOCK_EXPERTS
        )
        sums = tl.zeros([ROWS, DEPTH], tl.float32)
        for start in tl.static_range(0, SIZE, DEPTH):
            k = start + tl.arange(0, DEPTH)
            values = tl.load(inner + (token * COUNT + place) * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
            inside = (row < HIDDEN)[:, None] & (k < SIZE)[None, :]
            numbers = tl.load(matrix + row[:, None] * SIZE + k[None, :], mask=inside, other=0.0)
            sums += numbers.to(tl.float32) * values[None, :]
        weight = 1.0
        if place < TOP_K:
            weight = tl.load(weights + token * TOP_K + place)
        total += tl.sum(sums, axis=1) * weight
    tl.store(target, total.to(result.dtype.element_ty), mask=row < HIDDEN)
