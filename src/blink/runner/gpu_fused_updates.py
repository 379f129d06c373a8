# SPDX-License-Identifier: Apache-2.0
"""Steps of few rows on a GPU with adapters: the kernels of steps without, and one beside each GEMM."""

from __future__ import annotations

from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.lora.memory import GpuUpdates
from blink.kernels.operands import Norm
from blink.models.layer_weights import DenseWeights
from blink.plan.execution_plan import Choice, LayerPlan
from blink.runner.gpu_streams import WriterNorms
from blink.runner.step import Step
from blink.runner.stream import Then


class FusedWriterNorms(WriterNorms):
    """Each GEMM adds what adapters change to its own sums."""

    def __init__(self, step: Step, updates: GpuUpdates) -> None:
        """Begin with the embeddings of a batch's tokens."""
        super().__init__(step)
        self._updates = updates

    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:  # noqa: ARG002
        """Return the norm of the residual times a weight."""
        update, _found = self._updates.fuse(self._normed.x, weight)
        return gemm.normed_linear(self._normed, self._eps, weight, bias, update=update)

    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:  # noqa: ARG002
        """Add x times a weight to the residual."""
        update, _found = self._updates.fuse(x, weight)
        self._normed = gemm.add_linear(
            x,
            weight,
            self.residual,
            plain(then.next_norm),
            bias,
            tokens=self._step.plan.padded,
            update=update,
        )

    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:  # noqa: ARG002
        """Add a gated MLP of the norm of the residual."""
        assert plan.down is not None
        update, _found = self._updates.fuse(self._normed.x, mlp.gate_up)
        gated = gemm.gated_linear(self._normed, self._eps, mlp.gate_up, update=update)
        self.add(gated, mlp.down, None, plan.down, then)
