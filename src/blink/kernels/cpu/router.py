# SPDX-License-Identifier: Apache-2.0
"""The choice of experts on the CPU, with PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from blink.models.mlps import Router

_NO_SUM = 1e-20  # is added to sums, which else might be 0


def choose_experts(logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ranks and weights as kernels/router.py has them."""
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if router.groups > 1:
        choice = choice.masked_fill(~_keep_groups(choice, router), -torch.inf)
    experts = choice.topk(router.top_k).indices
    weights = scores.gather(1, experts)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
    ranks = torch.full_like(logits, -torch.inf, dtype=dtype)
    places = torch.arange(router.top_k, dtype=dtype, device=logits.device).neg_()
    return ranks.scatter_(1, experts, places.expand_as(experts)), weights * router.scale


def _keep_groups(choice: Tensor, router: Router) -> Tensor:
    """Return which experts are in the groups that a token may have."""
    grouped = choice.unflatten(1, (router.groups, -1))
    kept = grouped.topk(router.group_best).values.sum(-1).topk(router.top_groups).indices
    is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, kept, value=True)
    return is_kept[..., None].expand_as(grouped).flatten(1)
