# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2 layer between its projections: convolution, state-space rule, output gate and norm.

A layer has nh heads of size p in groups; the heads of a group share its B and C, of n numbers each. Channels are x, by
heads, then B and C, by groups. Of each token of a sequence, with the state S [n, p] of a head:

    x, B, C = silu(conv(channels) + conv_bias);  t = softplus(dt + dt_bias)
    S = exp(rate * t) * S + B (t * x)^T;  y = S^T C + skip * x
    output = norm(y * silu(z)), over all heads of a group

The rule is that of "Transformers are SSMs" (https://arxiv.org/abs/2405.21060).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class MambaWeights(NamedTuple):
    """A layer's weights beside its projections."""

    conv: Tensor  # [width, channels], the newest input last
    conv_bias: Tensor | None  # [channels]
    rate: Tensor  # float32 [nh], below 0
    dt_bias: Tensor  # float32 [nh]
    skip: Tensor  # float32 [nh]
    norm: Tensor  # float32 [nh * p]
    eps: float
    groups: int
    state_size: int  # n
    merge_means: Callable[[Tensor], Tensor] | None = None  # of parts of a group, from this one's; None: it is whole

    def merging(self, merge_means: Callable[[Tensor], Tensor]) -> MambaWeights:
        """Return the weights of a layer that has a part of its one group."""
        return self._replace(merge_means=merge_means)

    def find_rates(self, gated: Tensor) -> Tensor:
        """Return 1 / RMS of gated outputs [..., numbers of a group], with those of other parts: [..., 1]."""
        means = gated.square().mean(-1, keepdim=True)
        return torch.rsqrt((self.merge_means(means) if self.merge_means else means) + self.eps)

    def project(self, qkvz: Tensor, gates: Tensor) -> MambaProjections:
        """Name the parts of the results of a layer's two projections."""
        channels = self.conv.shape[1]
        return MambaProjections(qkvz[:, :channels], qkvz[:, channels:], gates)


class MambaProjections(NamedTuple):
    """What a layer projects, a row for each token; parts of wider matrices."""

    qkv: Tensor  # [tokens, channels]
    z: Tensor  # [tokens, nh * p]
    dt: Tensor  # [tokens, nh]

    @property
    def gates(self) -> Tensor:
        """What the rule reads beside the channels, as project() takes it."""
        return self.dt

    def take(self, tokens: slice | Tensor) -> MambaProjections:
        """Return some of the tokens."""
        return MambaProjections(*(part[tokens] for part in self))
