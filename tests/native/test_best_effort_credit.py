# SPDX-License-Identifier: Apache-2.0
"""What one class has saved up while the other could not run, or ran alone, makes nobody wait for long afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from blink.region.layout import StepResult
from harness import Harness, Inbox, QueuePair, submit
from test_scheduler_classes import costed, fill_costs, launch, prompt_of

SHARE = 0.1
CREDIT, DEBT = 64, 16  # segments of a millisecond: what may be saved up, and owed
BASE_MS, STEP_MS = 4.0, 12.0  # of a step after the long launches: at least, at most
# The account knows times alone: a launch of 100 ms stands for a hundred short ones.
LONG_TIMES = [(3, 100.0), (1000, 100.0), pytest.param(100_000, 1.0, marks=pytest.mark.long)]


def open_engine() -> AbstractContextManager[Harness]:
    patience = {"stall_timeout": 3600.0, "lease_timeout": 3600.0}
    sizes = {"max_sequences_per_worker": 32, "cq_entries": 16, "num_blocks": 96}
    return costed(best_effort_share=int(1000 * SHARE), base_ms=BASE_MS, **patience, **sizes)


def pass_time(h: Harness, pair: QueuePair, launches: int, milliseconds: float, *, best_effort: bool) -> None:
    """Let launches with sequences of the pair, of one class, take so long each; the table stays as it was."""
    for _ in range(launches):
        pair.drain()
        if pair.num_live < 2:
            submit(h, pair, prompt_of(3), max_tokens=60, best_effort=best_effort)
        assert h.step(milliseconds) == StepResult.LAUNCHED
        fill_costs(h, base_ms=BASE_MS)


def press(h: Harness, pair: QueuePair, number: int) -> None:
    """Let there always be an urgent prompt that waits."""
    while pair.num_live < 10:  # more than a step takes
        submit(h, pair, prompt_of(20, number + pair.num_live), max_tokens=1, cached=False)


@pytest.mark.parametrize(("launches", "milliseconds"), LONG_TIMES)
def test_credit_of_a_class_that_could_not_run_makes_the_other_wait_for_a_bounded_time(
    launches: int, milliseconds: float
) -> None:
    with open_engine() as h:
        urgent, other, inbox = h.frontend(0), h.frontend(1), Inbox()
        for i in range(2):
            submit(h, other, prompt_of(3, i), max_tokens=55, best_effort=True)
        while h.step(BASE_MS) == StepResult.LAUNCHED:
            pass  # until its frontend has left so much unread that it cannot go on
        pass_time(h, urgent, launches, milliseconds, best_effort=False)
        longest = waited = 0.0
        for number in range(80):
            press(h, urgent, number)
            inbox.drain(other)
            entry = launch(h, urgent, inbox)
            waited = waited + int(entry["predicted_ns"]) / 1e6 if entry["num_best_effort_rows"] else 0.0
            longest = max(longest, waited)
        assert 0 < longest <= CREDIT / (1 - SHARE) + STEP_MS


@pytest.mark.parametrize(("launches", "milliseconds"), LONG_TIMES)
def test_debt_of_a_class_that_ran_alone_makes_it_wait_for_a_bounded_time(launches: int, milliseconds: float) -> None:
    with open_engine() as h:
        urgent, other, inbox = h.frontend(0), h.frontend(1), Inbox()
        pass_time(h, other, launches, milliseconds, best_effort=True)
        longest = waited = 0.0
        for number in range(60):
            press(h, urgent, number)
            inbox.drain(other)
            entry = launch(h, urgent, inbox)
            waited = 0.0 if entry["num_best_effort_rows"] else waited + int(entry["predicted_ns"]) / 1e6
            longest = max(longest, waited)
        assert 0 < longest <= (DEBT + 1) / SHARE + 2 * STEP_MS
