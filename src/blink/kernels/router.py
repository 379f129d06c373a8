# SPDX-License-Identifier: Apache-2.0
"""Which experts a token has, where not the highest logits alone say it, and with which weights.

With the scores s of a token's experts, their softmax or each logit's sigmoid, in float32:

    c = s + bias; of all groups of experts those remain whose sums of their best c are the largest
    the token has the top_k experts with the largest c, with the weights s, which may then be divided by their sum

The bias is for the choice alone, as "Auxiliary-loss-free load balancing" (https://arxiv.org/abs/2408.15664) has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blink.formats.base import Weight

if TYPE_CHECKING:
    from blink.models.mlps import Router


class Chosen(NamedTuple):
    """Each token's experts, from its first on."""

    # [tokens, experts], of the activations' type: 0, -1, -2 ... of the chosen ones, minus infinity of others. So these
    # are logits by which kernels that choose the largest find the same experts in the same order.
    ranks: Tensor
    weights: Tensor  # float32 [tokens, top_k]


# A device's kernel, of logits, router, bias and the type of ranks. Returns ranks and weights.
ChooseKernel = Callable[[Tensor, "Router", "Tensor | None", torch.dtype], tuple[Tensor, Tensor]]

# A device's kernel, of rows, the router's weight, router and bias; None: it has none for those.
ChooseOfRows = Callable[[Tensor, Weight, "Router", "Tensor | None"], Chosen | None]


def choose_nothing(x: Tensor, weight: Weight, router: Router, bias: Tensor | None) -> None:
    """Have no kernel with the router's GEMM in it."""


def choose_experts(
    kernel: ChooseKernel, logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype
) -> Chosen:
    """Return the experts of each token; logits: float32 [tokens, experts]; bias: float32 [experts]; dtype: of ranks."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert (bias is not None) == router.has_bias
    return Chosen(*kernel(logits, router, bias, dtype))
