# SPDX-License-Identifier: Apache-2.0
"""Urgent work passes best-effort work, also between the segments of a step; and which class runs next.

The table of costs is the test's, and the clock: a launch takes what the table says, unless a test says otherwise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blink.region.layout import FinishReason, StepClass, StepResult
from blink.region.native import lib
from harness import (
    MILLISECOND,
    Harness,
    Inbox,
    QueuePair,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submit,
)

VOCAB = 97
SEGMENTS = 4
_GEOMETRY = (
    "best_effort_share",
    "overtake_share",
    "urgent_tpot_target_ns",
    "num_blocks",
    "cq_entries",
    "vocab_bytes",
    "num_automata",
)


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


@contextmanager
def costed(
    *, segments: int = SEGMENTS, base_ms: float = 1.0, token_ms: float = 0.25, **options: Any
) -> Iterator[Harness]:
    """A scheduler whose steps cost base_ms and token_ms for each token of their graph, cut into segments."""
    defaults = {"segment_ns": MILLISECOND, "best_effort_share": 100, "overtake_share": 0, "urgent_tpot_target_ns": 0}
    geometry = defaults | {name: options.pop(name) for name in _GEOMETRY if name in options}
    with running(small_config(**options), **geometry) as h:
        fill_costs(h, segments, base_ms, token_ms)
        yield h


def fill_costs(h: Harness, segments: int = SEGMENTS, base_ms: float = 1.0, token_ms: float = 0.25) -> None:
    for graph in range(int(h.geometry["num_graphs"])):
        tokens = int(h.geometry["graphs"][graph]["tokens"])
        cost = int((base_ms + token_ms * tokens) * MILLISECOND)
        h.costs[graph] = (cost, 0, segments)


def launch(h: Harness, pair: QueuePair, inbox: Inbox, segment_ms: float = 0.0) -> Any:
    """Run a pass that launches, and return its trace entry.

    The launch before has taken what was expected, or if it was a segment, segment_ms.
    """
    inbox.drain(pair)
    account = h.scheduler["account"]
    spent_ms = segment_ms if segment_ms and account["segmented"] else int(account["predicted_ns"]) / MILLISECOND
    assert h.step(spent_ms) == StepResult.LAUNCHED
    return newest(h)


def newest(h: Harness) -> Any:
    trace = h.region.trace()
    return trace[int(h.scheduler["step"]) % len(trace)].copy()


def rows_of(h: Harness) -> set[int]:
    return {index for index, _ in h.batch_rows()}


def start_long_step(h: Harness, count: int = 2, **params: Any) -> tuple[QueuePair, Inbox, list[int]]:
    """Let best-effort prompts be computed by a step in segments, of which the first two have run."""
    pair, inbox = h.frontend(), Inbox()
    params = {"max_tokens": 12, "best_effort": True} | params
    slow = [submit(h, pair, prompt_of(12, i), **params) for i in range(count)]
    for segment in range(2):
        entry = launch(h, pair, inbox)
        assert (entry["segment"], entry["num_segments"], entry["step_class"]) == (segment, SEGMENTS, StepClass.ALL)
        assert entry["num_best_effort_rows"] == count
    return pair, inbox, slow


def assert_answers(h: Harness, pair: QueuePair, inbox: Inbox, prompts: dict[int, tuple[list[int], int]]) -> None:
    run_until_finished(h, inbox, [pair], prompts)
    for sequence, (prompt, count) in prompts.items():
        assert inbox.tokens(sequence) == expected_tokens(prompt, count, VOCAB)
    assert h.scheduler["num_free_blocks"] + h.scheduler["num_evictable"] == h.geometry["num_blocks"]
    assert h.scheduler["num_free_slots"] == h.geometry["num_slots"]


def test_an_urgent_request_runs_at_the_next_border_and_the_step_goes_on_where_it_was() -> None:
    with costed() as h:
        pair, inbox, slow = start_long_step(h)
        urgent = submit(h, pair, prompt_of(9, 40), max_tokens=3)
        entry = launch(h, pair, inbox)
        assert (entry["num_segments"], entry["step_class"], entry["num_best_effort_rows"]) == (0, StepClass.URGENT, 0)
        assert rows_of(h) == {urgent & 0xFF}
        entry = launch(h, pair, inbox)
        assert (entry["segment"], entry["num_segments"]) == (2, SEGMENTS)
        inbox.drain(pair)
        assert len(inbox.tokens(urgent)) == 1 and inbox.tokens(slow[0]) == []
        assert launch(h, pair, inbox)["segment"] == 3
        launch(h, pair, inbox)
        assert rows_of(h) == {0, 1, 2}, "they decode together again"
        answers = {sequence: (prompt_of(12, i), 12) for i, sequence in enumerate(slow)}
        assert_answers(h, pair, inbox, answers | {urgent: (prompt_of(9, 40), 3)})


def test_steps_without_best_effort_rows_are_launched_whole() -> None:
    with costed() as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, prompt_of(12, i), max_tokens=9) for i in range(3)]
        run_until_finished(h, inbox, [pair], sequences)
        assert not h.region.trace()["num_segments"].any()
        assert int(h.scheduler["num_fast_steps"]) > 4


def test_a_step_that_is_too_short_to_be_cut_is_launched_whole() -> None:
    with costed(segments=1) as h:
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [submit(h, pair, prompt_of(12), max_tokens=9, best_effort=True)])
        assert not h.region.trace()["num_segments"].any()


def test_an_urgent_request_finds_a_place_though_paused_sequences_have_all() -> None:
    with costed(max_num_seqs=2) as h:
        pair, inbox, slow = start_long_step(h)
        urgent = submit(h, pair, prompt_of(9, 40), max_tokens=3)
        launch(h, pair, inbox)
        assert rows_of(h) == {urgent & 0xFF} and h.statistic("num_parked") == 1
        answers = {sequence: (prompt_of(12, i), 12) for i, sequence in enumerate(slow)}
        assert_answers(h, pair, inbox, answers | {urgent: (prompt_of(9, 40), 3)})


def test_a_parked_sequence_that_ends_in_its_paused_step_is_freed() -> None:
    with costed(max_num_seqs=1) as h:
        pair, inbox, slow = start_long_step(h, 1, max_tokens=1)
        urgent = submit(h, pair, prompt_of(9, 40), max_tokens=8)
        launch(h, pair, inbox)
        assert h.sequences["status"][0] == 1, "it is parked"
        launch(h, pair, inbox)
        launch(h, pair, inbox)
        launch(h, pair, inbox)
        inbox.drain(pair)
        assert inbox.finish(slow[0]) == FinishReason.LENGTH and inbox.finish(urgent) is None
        assert_answers(h, pair, inbox, {slow[0]: (prompt_of(12), 1), urgent: (prompt_of(9, 40), 8)})


def test_a_cancel_in_a_paused_step_is_answered_at_its_end() -> None:
    with costed() as h:
        pair, inbox, slow = start_long_step(h)
        urgent = submit(h, pair, prompt_of(9, 40), max_tokens=3)
        pair.cancel(slow[0])
        for _ in range(3):
            launch(h, pair, inbox)
            assert inbox.finish(slow[0]) is None
        launch(h, pair, inbox)
        inbox.drain(pair)
        assert inbox.finish(slow[0]) == FinishReason.ABORT and inbox.tokens(slow[0]) == []
        assert_answers(h, pair, inbox, {slow[1]: (prompt_of(12, 1), 12), urgent: (prompt_of(9, 40), 3)})


def test_a_lease_that_expires_in_a_paused_step_leaves_nothing_behind() -> None:
    with costed() as h:
        _, _, slow = start_long_step(h)
        other, inbox = h.frontend(1), Inbox()
        for _ in range(4):
            other.renew_lease()
            h.step(2501, finish=False)  # of a pause, half a lease counts
        assert h.sequences["paused_tokens"].any() or h.scheduler["num_live"] == 0
        for _ in range(SEGMENTS + 2):
            inbox.drain(other)
            h.step()
        assert h.scheduler["num_live"] == 0 and h.scheduler["num_segments"] == 0
        assert int(h.scheduler["num_free_slots"]) == int(h.geometry["num_slots"]) and len(slow) == 2
        late = submit(h, other, prompt_of(12), max_tokens=4)
        assert_answers(h, other, inbox, {late: (prompt_of(12), 4)})


def test_a_paused_step_keeps_its_blocks_and_the_urgent_request_waits_for_its_end() -> None:
    with costed(num_blocks=8, max_num_batched_tokens=64) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = submit(h, pair, prompt_of(44), max_tokens=12, best_effort=True, cached=False)
        launch(h, pair, inbox)
        urgent = submit(h, pair, prompt_of(30, 9), max_tokens=4, cached=False)
        for segment in range(1, SEGMENTS):
            assert launch(h, pair, inbox)["segment"] == segment
        launch(h, pair, inbox)
        assert rows_of(h) == {urgent & 0xFF}
        assert_answers(h, pair, inbox, {slow: (prompt_of(44), 12), urgent: (prompt_of(30, 9), 4)})
        assert h.statistic("num_preemptions") >= 1


def test_a_prompt_that_a_paused_step_still_computes_is_not_found_in_the_cache() -> None:
    with costed() as h:
        pair, inbox, slow = start_long_step(h, 1)
        same = submit(h, pair, prompt_of(12), max_tokens=3)
        launch(h, pair, inbox)
        inbox.drain(pair)
        assert inbox.cached(same) == 0
        assert_answers(h, pair, inbox, {slow[0]: (prompt_of(12), 12), same: (prompt_of(12), 3)})
        again = submit(h, pair, prompt_of(12), max_tokens=3)
        assert_answers(h, pair, inbox, {again: (prompt_of(12), 3)})
        assert inbox.cached(again) == 8


def test_completions_of_a_paused_step_keep_their_room() -> None:
    """The queue holds little: what passes may not use the entries that the paused rows will need."""
    with costed(max_num_seqs=2, cq_entries=8) as h:
        pair, inbox, slow = start_long_step(h, 2, max_tokens=2)
        urgent = [submit(h, pair, prompt_of(5, 40 + i), max_tokens=4) for i in range(2)]
        for _ in range(12):
            pair.renew_lease()
            h.step()  # nobody reads
        answers = {sequence: (prompt_of(12, i), 2) for i, sequence in enumerate(slow)}
        answers |= {sequence: (prompt_of(5, 40 + i), 4) for i, sequence in enumerate(urgent)}
        assert_answers(h, pair, inbox, answers)


def test_a_stop_in_a_paused_step_ends_the_scheduler() -> None:
    with costed() as h:
        start_long_step(h)
        h.region.store_control("stop", 1)
        assert h.step() == StepResult.STOPPED


def test_best_effort_work_gets_its_share_however_much_is_urgent() -> None:
    with costed(max_sequences_per_worker=32, best_effort_share=250, num_blocks=64) as h:
        pair, inbox, slow = start_long_step(h, 1, max_tokens=30)
        spent, sequence_number = {True: 0, False: 0}, 0
        for _ in range(120):
            while pair.num_live < 4:  # there is always a prompt that waits
                sequence_number += 1
                submit(h, pair, prompt_of(20, sequence_number), max_tokens=1, cached=False)
            entry = launch(h, pair, inbox)
            spent[int(entry["num_best_effort_rows"]) > 0] += int(entry["predicted_ns"])
        share = spent[True] / sum(spent.values())
        assert 0.2 < share < 0.3
        run_until_finished(h, inbox, [pair], slow)


def test_with_a_target_urgent_tokens_keep_their_time_and_best_effort_steps_run_in_what_is_left() -> None:
    """One row takes 1.75 ms, so that a segment of 1 ms of the others' step fits between; all at once would take 4."""
    target = 3 * MILLISECOND
    with costed(urgent_tpot_target_ns=target, token_ms=0.75, best_effort_share=1, num_blocks=64) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = [submit(h, pair, prompt_of(3, i), max_tokens=40, best_effort=True) for i in range(3)]
        urgent = submit(h, pair, prompt_of(3, 40), max_tokens=40)
        while len(inbox.tokens(urgent)) < 39:
            launch(h, pair, inbox)
        times = [int(c["time_ns"]) for c in inbox.completions[urgent][1:]]
        gaps = [late - early for early, late in itertools.pairwise(times[2:])]
        assert max(gaps) <= target
        assert min(len(inbox.tokens(sequence)) for sequence in slow) >= 6
        answers = {sequence: (prompt_of(3, i), 40) for i, sequence in enumerate(slow)}
        assert_answers(h, pair, inbox, answers | {urgent: (prompt_of(3, 40), 40)})


def test_segments_that_are_shorter_than_expected_run_more_often() -> None:
    """The table says 2 ms where a segment takes 0.5: once the first had its share, its like fit in between."""
    with costed(segments=12, urgent_tpot_target_ns=3 * MILLISECOND, token_ms=0.75, num_blocks=64) as h:
        h.costs["base_ns"][2] = 24 * MILLISECOND  # of up to four rows
        pair, inbox = h.frontend(), Inbox()
        for i in range(3):
            submit(h, pair, prompt_of(3, i), max_tokens=60, best_effort=True)
        urgent = submit(h, pair, prompt_of(3, 40), max_tokens=40)
        while int(h.scheduler["num_segments"]) or not inbox.tokens(urgent):
            launch(h, pair, inbox, 0.5)
        assert launch(h, pair, inbox, 0.5)["num_best_effort_rows"] == 0
        h.scheduler["best_effort_credit_ns"] = MILLISECOND + 1
        launched = [launch(h, pair, inbox, 0.5)["num_best_effort_rows"] > 0 for _ in range(16)]
        assert sum(launched) >= 8


def test_with_a_target_that_all_can_keep_they_share_their_steps() -> None:
    with costed(urgent_tpot_target_ns=20 * MILLISECOND, num_blocks=64) as h:
        pair, inbox = h.frontend(), Inbox()
        submit(h, pair, prompt_of(3), max_tokens=40, best_effort=True)
        submit(h, pair, prompt_of(3, 40), max_tokens=40)
        for _ in range(12):
            launch(h, pair, inbox)
        assert rows_of(h) == {0, 1} and newest(h)["step_class"] == StepClass.ALL


def test_decisions_can_be_replayed_from_the_trace() -> None:
    """The times of the first run are random, and most of its passes find a launch in flight."""
    chance = random.Random(5)

    def play(times: Iterator[tuple[int, int]] | None) -> tuple[bytes, bytes, list[tuple[int, int]]]:
        def step(address: int, now: int) -> int:
            now, launched = (now, now + chance.randrange(90_000)) if times is None else next(times, (now, now))
            return lib.blink_step_replayed(address, now, launched)

        with running(small_config(), step=step, num_blocks=64, urgent_tpot_target_ns=1_500_000) as h:
            h.region.header["hash_key"] = np.arange(16, dtype=np.uint8)
            pair, inbox = attached_at_once(h), Inbox()
            fill_costs(h)
            submitted = [submit(h, pair, prompt_of(9 + i, i), max_tokens=20, best_effort=i % 4 > 0) for i in range(8)]
            for _ in range(5000):
                inbox.drain(pair)
                if all(inbox.finish(sequence) for sequence in submitted):
                    break
                h.step(chance.random(), finish=times is not None or chance.random() < 0.4)
            trace = np.sort(h.region.trace(), order="step")
            trace = trace[trace["step"] > 0]
            assert (trace["num_segments"] > 0).any() and len(set(trace["step_class"].tolist())) > 1
            ended = int(trace["ended_ns"][-1])  # when a pass saw the last launch's end, which launched nothing
            passes = [*trace[["retired_ns", "launched_ns"]].tolist(), (ended, ended)]
            return h.decision_log().tobytes(), h.costs.tobytes(), passes

    first = play(None)
    second = play(iter(first[2]))
    assert second == first


def attached_at_once(h: Harness) -> QueuePair:
    """Attach by a pass of the harness's own, at its clock."""
    pair = h.attach_later(0)
    lib.blink_step(h.state.address, h.now)
    pair.start()
    return pair


@pytest.mark.parametrize("target_ms", [0, 4, 8])
def test_urgent_first_tokens_do_not_wait_for_best_effort_decoding(target_ms: int) -> None:
    with costed(urgent_tpot_target_ns=target_ms * MILLISECOND, num_blocks=64) as h:
        pair, inbox = h.frontend(), Inbox()
        for i in range(3):
            submit(h, pair, prompt_of(4, i), max_tokens=40, best_effort=True)
        for _ in range(9):
            launch(h, pair, inbox)
        urgent = submit(h, pair, prompt_of(9, 40), max_tokens=3)
        launch(h, pair, inbox)
        assert rows_of(h) == {urgent & 0xFF}
