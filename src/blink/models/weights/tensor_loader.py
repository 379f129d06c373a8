# SPDX-License-Identifier: Apache-2.0
"""TensorLoader: reads single weights of a checkpoint to where they are to be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.linear import pack_weight
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.packed_loader import load_packed
from blink.models.weights.target import WeightTarget


class TensorLoader:
    """Reads matrices, norms and other tensors. Each method raises a ConfigError if one is missing or misshapen."""

    def __init__(self, checkpoint: Checkpoint, target: WeightTarget, *, shifted_norms: bool) -> None:
        """shifted_norms: whether the family stores the weights of norms minus 1."""
        self._checkpoint = checkpoint
        self._target = target
        self._shifted_norms = shifted_norms

    def load_matrix(self, parts: dict[str, int], columns: int, order: Sequence[Tensor] | None = None) -> Weight:
        """Read matrices of the given numbers of rows, one below the other, for `linear`.

        order: which rows of each to take; None: all, as they are.
        """
        names = [f"{name}.weight" for name in parts]
        for name, rows in zip(names, parts.values(), strict=True):
            self._checkpoint.check(name, (rows, columns))
        quantized = self._target.read_quantized(self._checkpoint, *names, order=order)
        if quantized is None:
            quantized = load_packed(self._checkpoint, parts, columns, self._target, order)
        if quantized is not None:
            return quantized
        weight = self.stack("weight", parts, columns)
        return pack_weight(weight if order is None else weight[_join_orders(parts, order).to(weight.device)])

    def stack(self, ending: str, parts: dict[str, int], *columns: int) -> Tensor:
        """Read tensors of the given numbers of rows into one, one below the other."""
        for name, rows in parts.items():
            self._checkpoint.check(f"{name}.{ending}", (rows, *columns))
        weight = self._target.allocate(sum(parts.values()), *columns)
        for name, part in zip(parts, weight.split(list(parts.values())), strict=True):
            self.fill(f"{name}.{ending}", part)
        return weight

    def read_norm(self, name: str, size: int) -> Tensor:
        """Read a norm's weight; one that the checkpoint keeps less 1 is whole only in float32."""
        if not self._shifted_norms:
            return self.read(f"{name}.weight", size)
        weight = self.read(f"{name}.weight", size, dtype=torch.float32)
        return weight.add_(self._checkpoint.norm_shift)

    def read(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Read a tensor of a shape; device: to where, if not to the others."""
        self._checkpoint.check(name, shape)
        weight = self._target.allocate(*shape, dtype=dtype, device=device)
        self.fill(name, weight)
        return weight

    def fill(self, name: str, tensor: Tensor) -> None:
        """Write the tensor of a name, which has been checked, to an allocated one or a view of one."""
        self._target.fill(self._checkpoint, name, tensor)


def _join_orders(parts: dict[str, int], order: Sequence[Tensor]) -> Tensor:
    """Return which rows to take of matrices one below the other, from which to take of each."""
    starts = itertools.accumulate(parts.values(), initial=0)
    return torch.cat([start + rows for start, rows in zip(starts, order, strict=False)])
