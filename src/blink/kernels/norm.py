# SPDX-License-Identifier: Apache-2.0
"""The norms of the residual: RMS norms, and layer norms in plain PyTorch, which is kernels alone on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.operands import LayerNorm
from blink.kernels.rms_norm import last_token_norm, rms_norm


class NormCode(NamedTuple):
    """What computes a model's norms: as rms_norm and last_token_norm do, from what the model has for a weight."""

    whole: Callable[..., Tensor]
    last_tokens: Callable[..., Tensor]


def layer_norm(x: Tensor, norm: LayerNorm, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise rows of x [tokens, hidden]; with `residual`, add x to it in place and normalise the sum.

    A norm that replaces overwrites the residual, or x where there is none, with the result.
    """
    x = x if residual is None else residual.add_(x)
    found = functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, eps)
    return x.copy_(found) if norm.replaces else found


def last_token_layer_norm(
    x: Tensor, norm: LayerNorm, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Return the norm of x + residual [tokens, hidden] at each row's last token, [num_rows, hidden].

    Row r ends before token query_starts[r + 1]; the residual is kept.
    """
    last = (query_starts[1 : num_rows + 1] - 1).clamp_(min=0)
    return layer_norm(x.index_select(0, last), norm, eps, residual.index_select(0, last))


RMS_NORMS, LAYER_NORMS = NormCode(rms_norm, last_token_norm), NormCode(layer_norm, last_token_layer_norm)
