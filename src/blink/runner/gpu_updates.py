# SPDX-License-Identifier: Apache-2.0
"""Steps of few rows on a GPU with adapters: the same GEMMs, and two kernels for the updates of each."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.activation import activate
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.lora import StepUpdates
from blink.kernels.operands import Norm
from blink.models.layer_weights import DenseWeights
from blink.plan.execution_plan import Choice, LayerPlan
from blink.runner.gpu_streams import WriterNorms
from blink.runner.step import Step
from blink.runner.stream import Then


class UpdatedWriterNorms(WriterNorms):
    """What adapters change of a sum is added to the residual first: the GEMM then prepares the norm of the whole."""

    def __init__(self, step: Step, updates: StepUpdates) -> None:
        """Begin with the embeddings of a batch's tokens."""
        super().__init__(step)
        self._updates = updates

    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:  # noqa: ARG002
        """Return the norm of the residual times a weight."""
        normed = self._normed
        inverse_rms = self.residual.new_empty(len(self.residual), dtype=torch.float32)
        finish = self._updates.begin(
            normed.x, weight, early=True
        )  # in front of the GEMM, which loads weights meanwhile
        found = gemm.normed_linear(normed, self._eps, weight, bias, inverse_rms=inverse_rms)
        return finish(found, inverse_rms)

    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:
        """Add x times a weight to the residual."""
        self._updates.add(self.residual, x, weight, early=True)
        super().add(x, weight, bias, choice, then)

    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a gated MLP of the norm of the residual."""
        assert plan.gate_up is not None and plan.down is not None
        inner = activate(self.project(norm, mlp.gate_up, None, plan.gate_up), mlp.activation)
        self.add(inner, mlp.down, None, plan.down, then)
