# SPDX-License-Identifier: Apache-2.0
"""What one compilation may cost, counted in steps of some microseconds, wherever it spends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blink.grammar.errors import GrammarTooLargeError

_MAX_STEPS = 50_000


class _Budget(threading.local):
    left = _MAX_STEPS


_budget = _Budget()


@contextmanager
def budget() -> Iterator[None]:
    """Begin a compilation of this thread."""
    before, _budget.left = _budget.left, _MAX_STEPS
    try:
        yield
    finally:
        _budget.left = before


def spend(steps: int) -> None:
    """Note some steps of the compilation that runs.

    Raises:
        GrammarTooLargeError: there are none left.
    """
    _budget.left -= steps
    if _budget.left < 0:
        raise GrammarTooLargeError("it takes too much work")
