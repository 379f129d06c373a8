# SPDX-License-Identifier: Apache-2.0
"""Plan words: what the first rank tells each other rank to run. It alone decides, and it alone writes them.

Each word of 64 bits holds a number of the plan and the number of the step that it belongs to. A rank takes a plan when
all of its words are of the step that it waits for, so that one written half is never run.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

_NUMBER_BITS = 32


class PlanKind(IntEnum):
    """What a rank is to do."""

    END = 0  # nothing more
    WHOLE = 1  # a step
    SEGMENT = 2  # some layers of a step that may be paused


class StepPlanWords(NamedTuple):
    """A step as all ranks run it; the batch lies where all of them read it."""

    kind: PlanKind
    tokens: int = 0
    rows: int = 0
    decoding: bool = False
    scoring: bool = False
    first_layer: int = 0  # of a segment
    end_layer: int = 0


class PlanWords:
    """The words of all ranks."""

    def __init__(self, size: int) -> None:
        self.words = np.zeros((size, len(StepPlanWords._fields)), np.uint64)  # a row of each rank

    def write(self, rank: int, step: int, plan: StepPlanWords) -> None:
        """Tell a rank what step number `step`, counted from 1, is."""
        for index, value in enumerate(plan):
            self.words[rank, index] = (step << _NUMBER_BITS) | int(value)

    def read(self, rank: int, step: int) -> StepPlanWords | None:
        """Return what a rank is to run as step number `step`; None: it is not written, or not whole."""
        words = [int(word) for word in self.words[rank]]
        if any(word >> _NUMBER_BITS != step for word in words):
            return None
        kind, tokens, rows, decoding, scoring, first, end = (word & ((1 << _NUMBER_BITS) - 1) for word in words)
        return StepPlanWords(PlanKind(kind), tokens, rows, bool(decoding), bool(scoring), first, end)
