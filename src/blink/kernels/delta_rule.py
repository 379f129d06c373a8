# SPDX-License-Identifier: Apache-2.0
"""A recurrent layer between its projections: convolution, gated delta rule, norm and output gate.

A layer has nk key heads and nv value heads; value head h reads key head h // (nv / nk). Channels are q, k and v one
after the other, each by heads. Of each token of a sequence, with the state S of a value head:

    q, k, v = silu(conv(channels)), q and k of length 1, q also / sqrt(dk)
    S = exp(g) * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q
    output = norm(o) * silu(z)

with g = rate * softplus(a + dt_bias) and beta = sigmoid(b). The rule is that of "Gated Delta Networks"
(https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaWeights(NamedTuple):
    """A layer's weights beside its projections."""

    conv: Tensor  # [width, channels], the newest input last
    rate: Tensor  # float32 [nv], below 0
    dt_bias: Tensor  # float32 [nv]
    norm: Tensor  # float32 [dv]
    eps: float
    k_heads: int
    k_dim: int
    conv_bias: None = None  # there is none

    def merging(self, merge_means: object) -> DeltaWeights:  # noqa: ARG002 - as MambaWeights has it
        """Return the same: heads have norms of their own."""
        return self

    def project(self, qkvz: Tensor, gates: Tensor) -> Projections:
        """Name the parts of the results of a layer's two projections."""
        channels, heads = self.conv.shape[1], self.rate.shape[0]
        return Projections(qkvz[:, :channels], qkvz[:, channels:], gates[:, :heads], gates[:, heads:])


class Projections(NamedTuple):
    """What a layer projects, a row for each token; parts of wider matrices."""

    qkv: Tensor  # [tokens, channels]
    z: Tensor  # [tokens, nv * dv]
    b: Tensor  # [tokens, nv]
    a: Tensor  # [tokens, nv]

    @property
    def gates(self) -> Tensor:
        """What the rule reads beside the channels, as project() takes it."""
        return torch.cat((self.b, self.a), dim=1)

    def take(self, tokens: slice | Tensor) -> Projections:
        """Return some of the tokens."""
        return Projections(*(part[tokens] for part in self))
