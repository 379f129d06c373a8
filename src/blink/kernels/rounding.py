# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step's activations the GEMMs with GGUF matrices round: --cpu-gemm and --cpu-prompt-gemm.

A decode row must give the same bits whatever its number, as speculation compares them. So what rounds prompts leaves
decode rows alone, and what rounds all rows to 16 bits rounds each by itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

LEAST_ROWS: Final = 32  # of prompts in a step, from which on rounding to bfloat16 is worth it


@dataclass(frozen=True, slots=True)
class Rounding:
    """What may be rounded."""

    activations: bool = False  # of all rows, to 16 bits
    prompts: bool = False  # prompts' activations and the weights, to bfloat16

    def __bool__(self) -> bool:
        """Whether there is something."""
        return self.activations or self.prompts


EXACT: Final = Rounding()


class _Step(threading.local):
    rounding = EXACT
    tokens = 0  # of the step that this thread runs; 0: its prompts are not to be rounded by themselves
    first = 0


_step = _Step()


def begin_step(rounding: Rounding, tokens: int, first: int) -> None:
    """Tell this thread's step: its tokens, of which those from the first on are prompts'."""
    _step.rounding = rounding
    _step.tokens = tokens if rounding.prompts and tokens - first >= LEAST_ROWS else 0
    _step.first = first


def find_prompt_rows(rows: int) -> int:
    """Return the first row to round to bfloat16; their number if none is: a step's activations have all tokens."""
    return _step.first if rows == _step.tokens else rows


def rounds_activations() -> bool:
    """Whether other rows are rounded to 16 bits."""
    return _step.rounding.activations
