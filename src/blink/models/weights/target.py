# SPDX-License-Identifier: Apache-2.0
"""Where weights go while a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf_experts import GgufExperts
from blink.host.process import read_available_memory
from blink.models.weights.checkpoint import Checkpoint

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where weights go, in which type, and who is told how many of them are there."""

    device: torch.device
    dtype: torch.dtype
    advance: Callable[[int], object]
    kv_dtype: torch.dtype | None = None  # of keys and values; None: the weights'

    def allocate(self, *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Allocate one weight; device: where, if not with the others.

        Raises:
            ConfigError: there is no memory for it.
        """
        device = device or self.device
        try:
            return torch.empty(shape, dtype=dtype or self.dtype, device=device)
        except RuntimeError as error:  # torch has no type of its own for it on the CPU
            raise ConfigError(
                f"There is no memory for a weight of the shape {shape}: {_describe_memory(device)}. "
                "End what holds the rest, or use a smaller model."
            ) from error

    def read_quantized(
        self, checkpoint: Checkpoint, *names: str, order: Sequence[Tensor] | None = None
    ) -> QuantizedEmbedding | None:
        """Return the checkpoint's matrices of these names as one weight that stays quantised; None: they must not.

        order: which rows of each to take; None: all, as they are.
        """
        weight = checkpoint.read_quantized(names, order)
        if weight is not None:
            self.advance(weight.shape[0] * weight.shape[1])
        return weight

    def read_experts(
        self, checkpoint: Checkpoint, names: Sequence[Sequence[str]], rows: int, columns: int
    ) -> GgufExperts | None:
        """Return experts' matrices, each one's below each other, as one weight that stays quantised; None: as above."""
        shape, source = (len(names), rows, columns), checkpoint.stored_rows
        experts = None if source is None else source.read_experts(names, shape, self.allocate)
        if experts is not None:
            self.advance(math.prod(shape))
        return experts

    def fill(self, checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
        """Write the checkpoint's tensor of that name to an allocated one, or to a view of one."""
        checkpoint.fill(name, tensor)
        self.advance(tensor.numel())


def _describe_memory(device: torch.device) -> str:
    """Say how much is free where weights go, whoever has taken the rest."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB of the GPU's memory are free"
    return f"{read_available_memory() / _GIB:.1f} GiB of memory are free"
