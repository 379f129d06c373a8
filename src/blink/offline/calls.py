# SPDX-License-Identifier: Apache-2.0
"""A call of LLM: its prompts, and what is known of it while the engine works."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from blink.errors import BlinkError, OverloadedError
from blink.request.planner import PlannedSequence
from blink.request.source import Source
from blink.request.table import SequenceTable
from blink.sampling_params import RequestOutputKind, SamplingParams
from blink.text.generation import Generation
from blink.text.prompt import PromptRules

Progress = bool | Callable[..., Any]  # whether to show a progress bar, or what makes one


class Request:
    """One prompt of a call."""

    def __init__(self, request_id: str, source: Source, params: SamplingParams, rules: PromptRules) -> None:
        self.request_id = request_id
        self.source = source
        # All is gathered before anybody sees it.
        self.params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        self.rules = rules


class Call:
    """One call's sequences: the owner of them all in the table."""

    def __init__(self, table: SequenceTable, progress: Any) -> None:
        self.arrived = time.perf_counter()
        self.flow = 0
        self.submitted: list[int] = []
        self.error: BlinkError | None = None
        self._table = table
        self._progress = progress

    def submit(self, waiting: deque[PlannedSequence]) -> None:
        """Give the engine the first of these sequences, as many as it takes, and take them off the list.

        Raises:
            OverloadedError: the engine takes none, and has none of this client's that could leave.
        """
        while waiting:
            try:
                self.submitted.append(self._table.submit(self, waiting[0]))
            except OverloadedError:
                # Those of an interrupted call may still be leaving.
                if not self._table.client.stats().get("worker_sequences"):
                    raise
                return
            waiting.popleft()

    def check(self) -> None:
        """Raise what the call has failed with.

        Raises:
            BlinkError: the engine rejected a sequence, or was lost.
        """
        if self.error is not None:
            raise self.error

    def note_change(self, generation: Generation) -> None:
        """Move the progress bar when a sequence has ended."""
        if generation.finish_reason is not None:
            self._progress.update()

    def flush(self) -> None:
        """Leave the output with the sequences: it is taken at the end."""

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """Keep the error for the caller and cancel what is open."""
        self.error = self.error or error
        self.cancel(reason)

    def cancel(self, reason: str) -> None:
        """Take what is open away from the engine."""
        for sequence in self.submitted:
            self._table.cancel(sequence, reason)
        self.submitted.clear()


def show_progress(use_tqdm: Progress, total: int, unit: str) -> Any:
    """Return a progress bar, which shows nothing where none is wanted."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="generating", unit=unit, disable=not use_tqdm)
