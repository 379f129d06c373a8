# SPDX-License-Identifier: Apache-2.0
"""Pooling: makes a vector of each prompt out of the last norm's outputs. Plain PyTorch on every device.

A prompt may be computed in several steps. Pooling over more than its last token keeps a sum for each slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header
from blink.kernels.operands import INVALID_LOGITS


class Pooler:
    """Writes the vectors of a step's rows. Keeps the sums of prompts whose rest is computed later."""

    def __init__(self, kind: str, classifier: Tensor | None) -> None:
        """kind: last, mean or cls; classifier: float32 [1, hidden], which makes a score of a pooled state."""
        self._kind = kind
        self._classifier = classifier
        self._sums: Tensor | None = None  # float32 [slots + 1, hidden]; the last is of padding rows

    def pool(self, hidden: Tensor, batch: Batch, num_rows: int) -> None:
        """Write `vectors` of the first num_rows rows, padding included, and to `sampled_tokens` whether each is finite.

        hidden: [tokens, hidden], of every token. Rows that do not end their prompts get one too, which nobody reads.
        """
        starts = batch.query_starts[: num_rows + 1].long()
        if self._kind == "last":
            pooled = hidden.index_select(0, (starts[1:] - 1).clamp_(min=0)).float()
        else:
            pooled = self._add_up(hidden, batch, starts)
        vectors = pooled if self._classifier is None else pooled @ self._classifier.T
        batch.vectors[:num_rows, : vectors.shape[1]].copy_(vectors)
        is_finite = vectors.isfinite().all(1)
        batch.sampled_tokens[:num_rows].copy_(torch.where(is_finite, 0, INVALID_LOGITS))

    def _add_up(self, hidden: Tensor, batch: Batch, starts: Tensor) -> Tensor:
        """Return the mean over each row's prompt as far as it is computed, or its first token's state."""
        num_rows, num_tokens = len(starts) - 1, hidden.shape[0]
        tokens = torch.arange(num_tokens, device=hidden.device)
        belongs = (tokens >= starts[:-1, None]) & (tokens < starts[1:, None])  # [rows, tokens]
        is_mean = self._kind == "mean"
        if not is_mean:
            belongs &= batch.positions[:num_tokens] == 0
        # A matmul: its order of additions is fixed, which that of atomic ones is not. What is padding may be NaN.
        used = belongs.any(0)[:, None]
        total = belongs.float() @ torch.where(used, hidden.float(), 0.0)
        slots = self._slots_of(batch, num_rows)
        sums = self._find_sums(batch, hidden)
        is_first = batch.positions.index_select(0, starts[:-1].clamp(max=num_tokens - 1))[:, None] == 0
        total += torch.where(is_first, 0.0, sums.index_select(0, slots))
        sums.index_copy_(0, slots, total)
        return total / batch.context_lens[:num_rows, None].clamp(min=1) if is_mean else total

    @staticmethod
    def _slots_of(batch: Batch, num_rows: int) -> Tensor:
        """Return each row's place among the sums; all padding rows have one that is no slot's."""
        rows = torch.arange(num_rows, device=batch.row_slots.device)
        is_row = rows < batch.header[Header.NUM_ROWS]
        return torch.where(is_row, batch.row_slots[:num_rows], batch.params.shape[0]).long()

    def _find_sums(self, batch: Batch, hidden: Tensor) -> Tensor:
        shape = batch.params.shape[0] + 1, hidden.shape[1]
        if self._sums is None or self._sums.shape != shape:
            self._sums = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        return self._sums
