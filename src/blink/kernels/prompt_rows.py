# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step's activations are prompts': GEMMs may round these, and never those of decode rows.

A decode row must give the same bits whatever its number, as speculation compares them. See --cpu-prompt-gemm.
"""

from __future__ import annotations

import threading
from typing import Final

LEAST_ROWS: Final = 32  # of prompts in a step, from which on rounding is worth it


class _Step(threading.local):
    tokens = 0  # of the step that this thread runs; 0: nothing is to be rounded
    first = 0


_step = _Step()


def expect_rows(tokens: int, first: int) -> None:
    """Tell this thread's step: its tokens, of which those from the first on are prompts'; 0: round nothing."""
    _step.tokens = tokens if tokens - first >= LEAST_ROWS else 0
    _step.first = first


def find_prompt_rows(rows: int) -> int:
    """Return the first prompt row of activations; their number where none is: a step's activations have all tokens."""
    return _step.first if rows == _step.tokens else rows
