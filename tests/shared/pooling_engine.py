# SPDX-License-Identifier: Apache-2.0
"""An engine of a model that pools, for the API: it makes simple vectors of the lengths of prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from blink.region.layout import COMPLETION, VECTOR_CQE, CqeKind, FinishReason, Task
from fake_engine import ENGINE, FakeEngine

WIDTH = 6


class PoolingEngine(FakeEngine):
    """Makes of each prompt (length, 0, 1, 0, ...), or a score of its length; the parts come in two batches."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = WIDTH if task == Task.EMBED else 1
        self.info = replace(ENGINE, task=task, vector_width=width, normalizes_vectors=True, max_sequences=8)
        self.reason = FinishReason.STOP
        self._late: list[Any] = []

    def say(self, replies: tuple[str, ...]) -> None:
        """Begin anew: what is said does not depend on replies."""
        del replies
        self.submitted.clear()
        self._answered, self._late = 0, []

    def drain(self) -> Any:
        assert self.info is not None
        if self._late:
            rows, self._late = self._late, []
            return np.concatenate(rows)
        fresh = range(self._answered + 1, len(self.submitted) + 1)
        self._answered = len(self.submitted)
        early: list[Any] = [np.zeros(0, COMPLETION)]
        for sequence in fresh:
            first, *others = self._completions(sequence, len(self.submitted[sequence - 1].prompt))
            early.append(first)
            self._late += others
        if self._late:
            asyncio.get_running_loop().call_soon(self.wake)
        return np.concatenate(early)

    def _completions(self, sequence: int, length: int) -> list[Any]:
        assert self.info is not None
        parts = -(-self.info.vector_width // 4) if self.reason == FinishReason.STOP else 0
        rows = np.zeros(2 + parts, COMPLETION)
        rows["sequence"], rows["kind"][0], rows["kind"][1:] = sequence, CqeKind.ADMITTED, CqeKind.VECTOR
        vectors = rows.view(VECTOR_CQE)
        for place in range(parts):
            vectors["index"][1 + place] = 4 * place
        if parts:
            value = length if self.info.task == Task.EMBED else (length - 100) / 50
            vectors["values"][1][: self.info.vector_width] = [value, 0, 1, 0][: self.info.vector_width]
        rows["kind"][-1], rows["finish_reason"][-1], rows["time_ns"][-1] = CqeKind.FINISHED, self.reason, 0
        return [rows[:2].copy(), rows[2:].copy()]
