# SPDX-License-Identifier: Apache-2.0
"""A recurrent layer between its projections: convolution, gated delta rule, norm and output gate.

A layer has nk key heads and nv value heads; value head h reads key head h // (nv / nk). Channels are q, k and v one
after the other, each by heads. Of each token of a sequence, with the state S of a value head:

    q, k, v = silu(conv(channels)), q and k of length 1, q also / sqrt(dk)
    S = exp(g) * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q
    output = norm(o) * silu(z)

with g = rate * softplus(a + dt_bias) and beta = sigmoid(b). The rule is that of "Gated Delta Networks"
(https://arxiv.org/abs/2412.06464).

A sequence keeps S and the last inputs of the convolution in its slot. At position 0 both count as zeros, whatever the
slot holds: nobody clears a slot. A slot below 0 is that of padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.layer_cache import StateCache

CHUNK = 64  # tokens of a prompt that are computed at once


class DeltaWeights(NamedTuple):
    """A layer's weights beside its projections."""

    conv: Tensor  # [width, channels], the newest input last
    rate: Tensor  # float32 [nv], below 0
    dt_bias: Tensor  # float32 [nv]
    norm: Tensor  # float32 [dv]
    eps: float
    k_heads: int
    k_dim: int


class Projections(NamedTuple):
    """What a layer projects, a row for each token; parts of wider matrices."""

    qkv: Tensor  # [tokens, channels]
    z: Tensor  # [tokens, nv * dv]
    b: Tensor  # [tokens, nv]
    a: Tensor  # [tokens, nv]

    @classmethod
    def of(cls, qkvz: Tensor, gates: Tensor, weights: DeltaWeights) -> Projections:
        """Name the parts of the results of a layer's two projections."""
        channels, heads = weights.conv.shape[1], weights.rate.shape[0]
        return cls(qkvz[:, :channels], qkvz[:, channels:], gates[:, :heads], gates[:, heads:])

    def take(self, tokens: slice | Tensor) -> Projections:
        """Return some of the tokens."""
        return Projections(*(part[tokens] for part in self))


class Rows(NamedTuple):
    """Which tokens belong to which sequence."""

    slots: Tensor  # int32 [rows]; below 0: the row is padding
    positions: Tensor  # int32 [rows]: of each row's first token
    starts: Tensor  # int32 [rows + 1]: where its tokens begin

    @classmethod
    def of(cls, batch: Batch, num_rows: int) -> Rows:
        """Describe the first rows of a batch, those that are padding among them."""
        starts, context = batch.query_starts[: num_rows + 1], batch.context_lens[:num_rows]
        slots = batch.row_slots[:num_rows].masked_fill(context == 0, -1)
        return cls(slots, context - starts.diff(), starts)


# Returns each token's gated output [tokens, nv * dv], of the type of z, and advances the rows' slots.
Advance = Callable[[Projections, StateCache, Rows, DeltaWeights], Tensor]
