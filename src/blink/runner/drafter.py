# SPDX-License-Identifier: Apache-2.0
"""Drafter: what reads a model's steps, and guesses the tokens that follow its samples."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.layer_cache import LayerCache
from blink.plan.site import Bucket


class Drafter(Protocol):
    """Drafts for a model; keeps residuals of the steps that are under way, and nothing else."""

    @property
    def reads_end(self) -> bool:
        """Whether it reads the residual behind the last layer."""
        ...

    def reserve(self, batch: Batch, residual: Tensor) -> None:
        """Keep what is like a residual [max_tokens, hidden] in memory of the batch: its steps are captured in parts."""
        ...

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Copy the residual [tokens, hidden] of a step as a layer begins, if it is read; behind the last: its end."""
        ...

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step whose rows are sampled, and write batch.head_drafts; cache: the head's layer of the KV cache."""
        ...
