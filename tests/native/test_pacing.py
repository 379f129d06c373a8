# SPDX-License-Identifier: Apache-2.0
"""Pacing: launches wait while no token is due, never longer, and for nobody who has not asked for it.

The clock is the test's: a step takes what the table of costs says, and a hold lasts as long as the scheduler says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blink import config, sampling_params
from blink.region.layout import FinishReason, StepResult
from blink.region.native import lib
from harness import MILLISECOND, Harness, Inbox, Step, expected_tokens, running, small_config, submit

STEP_MS = 2.0
TARGET_MS = 10.0
EARLY_MS = STEP_MS / 16 + 0.1  # by which a step is launched sooner than its prediction says
AHEAD, BEHIND = 1 / 8, 8  # targets that a sequence may be ahead of its pace, and behind it
PROMPT = [3, 1, 4, 1, 5]


class Server:
    """A scheduler whose steps end in time, and one frontend that reads at once."""

    def __init__(self, h: Harness, step_ms: float = STEP_MS) -> None:
        self.h, self.step_ns = h, int(step_ms * MILLISECOND)
        for graph in range(int(h.geometry["num_graphs"])):
            h.costs[graph] = (self.step_ns, 0, 1)
        self.pair, self.inbox = h.frontend(), Inbox()
        self.ends_at: int | None = None
        self.begun = h.now
        self.launches: list[int] = []  # when
        self.rows: list[int] = []  # of each of them
        self.held_ns = self._held_since = 0

    def submit(self, target_ms: float | None = None, *, prompt: list[int] = PROMPT, **params: Any) -> int:
        options: dict[str, Any] = {"max_tokens": 40, "tpot_target_ms": target_ms}
        return submit(self.h, self.pair, prompt, **(options | params))

    def run(self, milliseconds: float) -> None:
        """Let so much time go by; the first pass is now."""
        end = self.h.now + int(milliseconds * MILLISECOND)
        while (at := self._next()) <= end:
            self._pass(at)
        self.h.now = end

    def _next(self) -> int:
        """Return when the next pass is due that does something."""
        if lib.blink_has_news(self.h.state.address, 0):
            return self.h.now
        wakes_at = self.ends_at or int(self.h.scheduler["held_until_ns"])
        return max(self.h.now, wakes_at) if wakes_at else 1 << 62

    def _pass(self, at: int) -> None:
        h = self.h
        if self.ends_at is not None and at >= self.ends_at:
            h.finish()
            self.ends_at = None
        was_held, h.now = self.is_held, at
        result = h.step(0, finish=False)
        if self.is_held and not was_held:
            self._held_since = at
        self.held_ns += at - self._held_since if was_held and not self.is_held else 0
        if result == StepResult.LAUNCHED:
            self.launches.append(at)
            self.rows.append(len(h.batch_rows()))
            self.ends_at = at + self.step_ns
        self.inbox.drain(self.pair)

    def times(self, sequence: int) -> list[float]:
        """Return when each token of a sequence came, in milliseconds."""
        tokens = self.inbox.completions.get(sequence, [])
        return [(int(c["time_ns"]) - self.begun) / MILLISECOND for c in tokens if c["kind"] == 2]

    def gaps(self, sequence: int) -> list[float]:
        times = self.times(sequence)
        return [round(after - before, 6) for before, after in itertools.pairwise(times)]

    @property
    def is_held(self) -> bool:
        return int(self.h.scheduler["held_until_ns"]) > 0


@contextmanager
def serving(target_ms: float = 0.0, *, step: Step = lib.blink_step, **sizes: Any) -> Iterator[Server]:
    sizes = {"tpot_target_ns": int(target_ms * MILLISECOND), "overtake_share": 0, "num_blocks": 64} | sizes
    options = {name: sizes.pop(name) for name in ("max_num_seqs",) if name in sizes}
    with running(small_config(**options), step=step, **sizes) as h:
        yield Server(h)


def assert_paced(gaps: list[float], target_ms: float) -> None:
    """See that tokens come when they are due, but for what a step is launched sooner."""
    assert gaps and all(target_ms - EARLY_MS - 0.01 <= gap <= target_ms + EARLY_MS + 0.01 for gap in gaps), gaps


@pytest.mark.parametrize(("engine_ms", "own_ms"), [(TARGET_MS, None), (0, TARGET_MS), (3 * TARGET_MS, TARGET_MS)])
def test_a_step_waits_until_its_token_is_due(engine_ms: float, own_ms: float | None) -> None:
    with serving(engine_ms) as server:
        sequence = server.submit(own_ms)
        server.run(500)
        assert server.times(sequence)[0] == STEP_MS
        assert_paced(server.gaps(sequence), TARGET_MS)
        assert server.inbox.tokens(sequence) == expected_tokens(PROMPT, 40, 97)


def test_tokens_are_delivered_before_the_next_step_waits() -> None:
    with serving(TARGET_MS) as server:
        sequence = server.submit()
        server.run(95)
        assert server.is_held
        assert len(server.inbox.tokens(sequence)) == len(server.launches)


def test_without_a_target_nothing_waits() -> None:
    with serving() as server:
        sequence = server.submit()
        server.run(500)
        assert set(server.gaps(sequence)) == {STEP_MS} and server.held_ns == 0


def test_without_a_table_of_costs_nothing_waits() -> None:
    with serving(TARGET_MS) as server:
        server.h.costs["num_segments"] = 0
        sequence = server.submit()
        server.run(500)
        assert set(server.gaps(sequence)) == {STEP_MS}


def test_a_submission_ends_a_hold_at_once() -> None:
    with serving(TARGET_MS) as server:
        first = server.submit()
        server.run(45)
        assert server.is_held
        late, at = server.submit(prompt=[7, 8, 9]), server.h.now
        server.run(STEP_MS)
        assert server.launches[-1] == at and server.rows[-1] == 2, "the rows that decode ride along"
        assert server.times(late) == [(at - server.begun) / MILLISECOND + STEP_MS]
        server.run(400)
        assert_paced(server.gaps(late), TARGET_MS)
        assert server.inbox.tokens(first) == expected_tokens(PROMPT, 40, 97)


def test_no_token_is_later_than_a_target_behind_one_that_came_early() -> None:
    with serving(TARGET_MS) as server:
        first = server.submit(max_tokens=50)
        server.run(45)
        for start in range(6):  # each ends with its first token, and lets the other have one
            server.submit(prompt=[start, 8, 9], max_tokens=1)
            server.run(STEP_MS)
        early = len(server.times(first))
        server.run(200)
        gaps = server.gaps(first)
        assert gaps[early - 6 : early - 1] == [STEP_MS] * 5
        assert gaps[early - 1] == pytest.approx((1 + AHEAD) * TARGET_MS - EARLY_MS)
        assert_paced(gaps[early:], TARGET_MS)


def test_a_prompt_that_is_half_computed_waits_for_nothing() -> None:
    with serving(TARGET_MS) as server:
        server.submit()
        server.run(45)
        at = len(server.launches)
        late = server.submit(prompt=[(5 * i) % 97 for i in range(60)], max_tokens=3)  # a step takes 32 tokens
        server.run(3 * STEP_MS)
        assert [b - a for a, b in zip(server.launches[at:-1], server.launches[at + 1 :], strict=True)] == [
            server.step_ns
        ]
        assert len(server.times(late)) == 1


def test_no_step_waits_while_a_sequence_waits_for_a_place() -> None:
    with serving(TARGET_MS, max_num_seqs=2) as server:
        first, second, third = (server.submit(max_tokens=n) for n in (20, 20, 5))
        server.run(38)
        assert server.held_ns == 0 and not server.times(third)
        server.run(2 * STEP_MS)
        assert server.times(third), "it starts where one has ended"
        server.run(200)
        assert server.held_ns > 0
        assert all(server.inbox.finish(each) == FinishReason.LENGTH for each in (first, second, third))


def test_the_smallest_target_counts_and_none_at_all_is_the_smallest() -> None:
    with serving(4 * TARGET_MS) as server:
        slow = server.submit(max_tokens=30)
        server.run(200)
        assert_paced(server.gaps(slow), 4 * TARGET_MS)
        quick = server.submit(TARGET_MS, max_tokens=20)
        server.run(100)
        assert_paced(server.gaps(quick), TARGET_MS)
        server.run(STEP_MS)
        eager = server.submit(0, max_tokens=20)
        server.run(60)
        assert set(server.gaps(eager)) == {STEP_MS}


def test_a_latency_sensitive_sequence_keeps_its_class_target() -> None:
    with serving(3 * TARGET_MS, urgent_tpot_target_ns=int(TARGET_MS * MILLISECOND)) as server:
        urgent = server.submit(max_tokens=10)
        server.run(200)
        assert_paced(server.gaps(urgent), TARGET_MS)
        patient = server.submit(max_tokens=10, best_effort=True)
        server.run(400)
        assert_paced(server.gaps(patient), 3 * TARGET_MS)


def test_what_came_late_is_made_up_for_within_bounds() -> None:
    with serving(TARGET_MS) as server:
        sequence = server.submit(max_tokens=58)
        server.run(45)
        before = len(server.times(sequence))
        server.h.now += 1000 * MILLISECOND  # the machine stood still for a hundred targets
        server.run(300)
        gaps = server.gaps(sequence)[before:]
        hurried = next(i for i, gap in enumerate(gaps) if gap > STEP_MS)
        # Each of these makes up for all but a step's time.
        assert hurried == pytest.approx(BEHIND * TARGET_MS / (TARGET_MS - STEP_MS), abs=2)
        assert_paced(gaps[hurried + 1 :], TARGET_MS)


def test_a_target_shorter_than_a_step_changes_nothing() -> None:
    with serving(STEP_MS / 2) as server:
        sequence = server.submit()
        server.run(200)
        assert set(server.gaps(sequence)) == {STEP_MS}
        assert server.h.scheduler["num_fast_steps"] > 30


def test_a_cancel_is_obeyed_while_a_step_waits() -> None:
    with serving(TARGET_MS) as server:
        sequence, other = server.submit(), server.submit()
        server.run(45)
        server.pair.cancel(sequence)
        assert server.h.step(0, finish=False) == StepResult.HELD
        server.inbox.drain(server.pair)
        assert server.inbox.finish(sequence) == FinishReason.ABORT
        server.pair.cancel(other)
        assert server.h.step(0, finish=False) == StepResult.IDLE
        assert not server.is_held


def test_a_drain_ends_the_hold() -> None:
    with serving(1000) as server:
        sequence = server.submit(max_tokens=10)
        server.run(50)
        assert server.is_held
        server.h.region.store_control("drain", 1)
        server.h.step(0, finish=False)  # sees it, and launches
        server.ends_at = server.h.now + server.step_ns
        server.run(10 * STEP_MS)
        assert server.inbox.finish(sequence) == FinishReason.LENGTH


def test_the_time_of_holds_is_counted() -> None:
    with serving(TARGET_MS) as server:
        server.submit()
        server.run(45)
        while server.is_held:
            server.run(1)
        assert server.h.statistic("held_ns") == server.held_ns > 0
        assert server.h.statistic("running_ns") == (len(server.launches) - 1) * server.step_ns


def play(server: Server, seed: int) -> list[tuple[int, float]]:
    """Serve random arrivals of sequences with targets; return each with its target."""
    script, found = random.Random(seed), []
    for _ in range(25):
        target = script.choice((5.0, TARGET_MS, 3 * TARGET_MS))
        prompt = [script.randrange(97) for _ in range(script.randint(2, 20))]
        if server.h.scheduler["num_live"] < 4:
            found.append((server.submit(target, prompt=prompt, max_tokens=script.randint(1, 30)), target))
        server.run(script.choice((0.3, 3.1, 17.7, 60.2)))
    server.run(1000)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_later_than_its_due_time_and_a_step(seed: int) -> None:
    with serving() as server:
        sequences = play(server, seed)
        for sequence, target in sequences:
            times = server.times(sequence)
            assert server.inbox.finish(sequence) == FinishReason.LENGTH
            for count, at in enumerate(times):
                assert at <= times[0] + count * target + STEP_MS
            assert max(server.gaps(sequence), default=0) <= (1 + AHEAD) * target + STEP_MS
        assert server.held_ns > 300 * MILLISECOND and server.h.scheduler["num_fast_steps"] == 0


@pytest.mark.long
@pytest.mark.parametrize("lanes", [3, 8])
def test_any_number_of_lanes_decides_alike(lanes: int, lane_steps: Callable[[int], Step]) -> None:
    launches: list[list[int]] = []
    for step in (lib.blink_step, lane_steps(lanes)):
        with serving(step=step) as server:
            play(server, 1)
            launches.append([at - server.begun for at in server.launches])
    assert launches[0] == launches[1]


def test_the_longest_target_is_the_engines_and_the_requests() -> None:
    assert sampling_params.MAX_TPOT_TARGET_MS == config.MAX_TPOT_TARGET_MS
