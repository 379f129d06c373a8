# SPDX-License-Identifier: Apache-2.0
"""The times of each sequence, and how it ended, as metrics."""

from __future__ import annotations

import time

from blink.api.observe import metrics as names
from blink.api.observe.metrics import EngineMetrics
from blink.request.table import Observer, OpenSequence
from blink.text.generation import Times


class SequenceMetrics(Observer):
    """Observe the sequences of one worker with one engine."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._observe = metrics.observe

    def note_admission(self, opened: OpenSequence) -> None:
        """Measure the time in the queue."""
        opened.admitted = time.perf_counter()
        self._observe(names.QUEUE, opened.admitted - opened.owner.arrived)

    def note_token(self, opened: OpenSequence, time_ns: int) -> None:
        """Measure the time to this token."""
        if opened.first is None:
            opened.first = time.perf_counter()
            self._observe(names.TTFT, opened.first - opened.owner.arrived)
        else:
            self._observe(names.ITL, (time_ns - opened.last_ns) * 1e-9)
        opened.last_ns = time_ns

    def note_end(self, opened: OpenSequence, reason: str) -> None:
        """Count the sequence and measure its parts."""
        self._metrics.count_finished(reason)
        observe, now, num_tokens = self._observe, time.perf_counter(), opened.generation.num_tokens
        opened.generation.times = Times(opened.owner.arrived, opened.admitted, opened.first, now)
        observe(names.E2E, now - opened.owner.arrived)
        observe(names.PROMPT_TOKENS, opened.num_prompt_tokens)
        observe(names.COMPUTED_TOKENS, opened.num_prompt_tokens - opened.generation.cached_tokens)
        observe(names.GENERATION_TOKENS, num_tokens)
        observe(names.PREEMPTIONS, opened.num_preemptions)
        if opened.admitted is not None:
            observe(names.INFERENCE, now - opened.admitted)
        if opened.first is not None:
            observe(names.PREFILL, opened.first - (opened.admitted or opened.owner.arrived))
            observe(names.DECODE, now - opened.first)
            if num_tokens > 1:
                observe(names.TPOT, (now - opened.first) / (num_tokens - 1))
