# SPDX-License-Identifier: Apache-2.0
"""Steps of few rows on a GPU with adapters: the kernels of steps without, and a small one in front of each GEMM."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.gpu.gemm.gemm_kernel import GemmUpdate
from blink.kernels.gpu.lora.memory import GpuUpdates
from blink.runner.gpu_streams import WriterNorms
from blink.runner.step import Step


class FusedWriterNorms(WriterNorms):
    """Each GEMM adds what adapters change to its own sums."""

    def __init__(self, step: Step) -> None:
        """Begin with the embeddings of a batch's tokens."""
        self._updates = cast(GpuUpdates, step.updates).fuse()
        super().__init__(step)

    def _begin_update(self, x: Tensor, weight: Weight) -> GemmUpdate | None:
        return self._updates.begin(x, weight)
