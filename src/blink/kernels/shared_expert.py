# SPDX-License-Identifier: Apache-2.0
"""The expert that all tokens have, added to those that they choose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AddShared = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]  # the kernel of add_shared_expert()


def add_shared_expert(found: Tensor, same: Tensor, x: Tensor, gate: Tensor | None) -> Tensor:
    """Add an expert of all tokens to the others in place, by PyTorch; return the sum.

    found, same: [tokens, hidden], of the others and of this one; x: [tokens, hidden], what they read; gate: [hidden],
    whose product's sigmoid this one is multiplied by.
    """
    assert found.shape == same.shape == x.shape
    return found.add_(same) if gate is None else found.addcmul_(same, torch.sigmoid(x @ gate)[:, None])
