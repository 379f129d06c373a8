# SPDX-License-Identifier: Apache-2.0
"""Steps of any size on a GPU by the kernels of decoding, in one order: a token has the same bits in any step.

A layer takes five kernels, with prompts six. Who writes the residual prepares the norm of it.
"""

from __future__ import annotations

from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.operands import Norm
from blink.kernels.rms_norm import rms_norm
from blink.plan.execution_plan import Choice
from blink.runner.gpu_streams import WriterNorms
from blink.runner.step import take_last_tokens


class OrderedNorms(WriterNorms):
    """Who writes the residual prepares the norm of it, and that of the output layer is a kernel."""

    ordered = True

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
