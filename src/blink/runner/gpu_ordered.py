# SPDX-License-Identifier: Apache-2.0
"""Steps of any size on a GPU by the kernels of decoding, in which a token has the same bits in any step: five kernels
a layer, six with prompts. Who writes the residual prepares the norm of it, in parts that are added in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.gpu.gemm.decode import NormInput
from blink.kernels.operands import Norm
from blink.kernels.rms_norm import rms_norm
from blink.plan.execution_plan import Choice
from blink.plan.site import Bucket
from blink.runner.gpu_streams import WriterNorms
from blink.runner.step import Step, take_last_tokens


class KeptSteps:
    """What steps keep between two segments, in memory of its own: one step pauses at a time."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # that captured graphs use
        self._steps: dict[Bucket, tuple[Tensor, NormInput]] = {}

    def keep(self, size: Bucket, residual: Tensor, normed: NormInput) -> None:
        """Keep a step's residual and the norm of it."""
        found = self._keep("x", normed.x), self._keep("square_sums", normed.square_sums)
        self._steps[size] = self._keep("residual", residual), NormInput(*found)

    def find(self, size: Bucket) -> tuple[Tensor, NormInput]:
        """Return what a step has kept."""
        return self._steps[size]

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        size, memory = tensor.numel() * tensor.itemsize, self._memory.get(name)
        if memory is None or memory.numel() < size:
            if memory is not None:
                self._outgrown.append(memory)
            memory = self._memory[name] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        return memory[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class OrderedNorms(WriterNorms):
    """Who writes the residual prepares the norm of it, and that of the output layer is a kernel."""

    ordered = True

    def __init__(self, step: Step, kept: KeptSteps, begun: tuple[Tensor, NormInput] | None) -> None:
        super().__init__(step, begun)
        self._kept = kept

    @classmethod
    def begin(cls, step: Step, kept: KeptSteps) -> OrderedNorms:
        """Begin with the embeddings of a batch's tokens."""
        return cls(step, kept, None)

    @classmethod
    def resume(cls, step: Step, kept: KeptSteps) -> OrderedNorms:
        """Begin with what a step of this size has kept."""
        return cls(step, kept, kept.find(step.bucket))

    def read(self, norm: Norm | None) -> Tensor:
        """Return the norm of the residual [tokens, hidden]."""
        return rms_norm(self.residual, plain(norm), self._eps)

    def compute_logits(self, weight: Weight, choice: Choice) -> Tensor:
        """Return the logits [rows, vocab] of each row's last token."""
        step, last = self._step, self.residual
        if not step.bucket.decoding:
            last = take_last_tokens(last, step.batch, step.bucket.rows)
        normed = rms_norm(last, plain(step.model.norm), self._eps)
        return step.kernels.matmuls[choice.kernel].multiply(normed, weight, None)

    def pause(self) -> None:
        """Keep the residual and the norm of it where the next segment finds them."""
        self._kept.keep(self._step.bucket, self.residual, self._normed)
