# SPDX-License-Identifier: Apache-2.0
"""Prefill preempts decode steps of its own class: when, for how long, and at whose expense."""

from __future__ import annotations

import pytest

from blink.region.layout import StepClass
from harness import MILLISECOND, Harness, Inbox, QueuePair, run_until_finished, submit
from test_scheduler_classes import SEGMENTS, assert_answers, costed, launch, newest, prompt_of, rows_of

DECODE_MS = 4.0
SAVED_MS = 32  # that prompts may have saved up: segments of a millisecond


def fill(h: Harness, decode_ms: float = DECODE_MS) -> None:
    """Let a step of any decoding rows take as long, and one with prompts half a millisecond a token beside."""
    for graph in range(int(h.geometry["num_graphs"])):
        tokens = int(h.geometry["graphs"][graph]["tokens"]) if graph >= int(h.geometry["num_decode_graphs"]) else 0
        h.costs[graph] = (int((decode_ms + 0.5 * tokens) * MILLISECOND), 0, SEGMENTS if tokens <= 8 else 1)


def start_decoding(h: Harness) -> tuple[QueuePair, Inbox, dict[int, tuple[list[int], int]]]:
    """Let a sequence decode, and a prompt come during one of its steps: from then on more of them are expected."""
    fill(h)
    pair, inbox = h.frontend(), Inbox()
    first = submit(h, pair, prompt_of(6), max_tokens=50)
    for _ in range(4):
        assert launch(h, pair, inbox)["num_segments"] == 0
    assert h.scheduler["preemption_until"] == 0
    late = submit(h, pair, prompt_of(6, 40), max_tokens=50)
    for rows in (1, 2):
        entry = launch(h, pair, inbox)
        assert (entry["num_segments"], entry["num_rows"]) == (0, rows), "it waits for the end of the step"
    return pair, inbox, {first: (prompt_of(6), 50), late: (prompt_of(6, 40), 50)}


def reach_segment(h: Harness, pair: QueuePair, inbox: Inbox, wanted: int) -> None:
    """Launch until a segment of a decoding step runs."""
    for _ in range(3 * SEGMENTS):
        entry = launch(h, pair, inbox)
        if entry["num_segments"] and entry["segment"] == wanted:
            return
    raise AssertionError(f"no step was launched up to its segment {wanted}")


def test_a_prompt_preempts_a_decode_step_which_resumes_where_it_was() -> None:
    with costed(overtake_share=500) as h:
        pair, inbox, answers = start_decoding(h)
        reach_segment(h, pair, inbox, 1)
        before = int(h.scheduler["preemption_credit_ns"])
        urgent = submit(h, pair, prompt_of(9, 60), max_tokens=5)
        entry = launch(h, pair, inbox)
        assert (entry["num_segments"], entry["step_class"], entry["num_tokens"]) == (0, StepClass.URGENT, 9)
        assert rows_of(h) == {urgent & 0xFF}
        earned = DECODE_MS / SEGMENTS * 0.5
        assert int(h.scheduler["preemption_credit_ns"]) == pytest.approx(
            before + (earned - DECODE_MS) * MILLISECOND, rel=0.1
        )
        assert launch(h, pair, inbox)["segment"] == 2
        inbox.drain(pair)
        assert len(inbox.tokens(urgent)) == 1
        assert launch(h, pair, inbox)["segment"] == 3
        assert launch(h, pair, inbox)["num_rows"] == 3, "they decode together again"
        assert_answers(h, pair, inbox, answers | {urgent: (prompt_of(9, 60), 5)})


def test_no_prompt_preempts_unless_a_share_is_given() -> None:
    with costed(overtake_share=0) as h:
        pair, inbox, answers = start_decoding(h)
        for start in range(5):
            answers |= {submit(h, pair, prompt_of(9, start), max_tokens=2): (prompt_of(9, start), 2)}
            launch(h, pair, inbox)
        assert_answers(h, pair, inbox, answers)
        assert not h.region.trace()["num_segments"].any()


def test_best_effort_prompts_preempt_nobody() -> None:
    with costed(overtake_share=500) as h:
        pair, inbox, _ = start_decoding(h)
        reach_segment(h, pair, inbox, 1)
        submit(h, pair, prompt_of(9, 60), max_tokens=5, best_effort=True)
        assert [int(launch(h, pair, inbox)["segment"]) for _ in range(2)] == [2, 3]
        assert launch(h, pair, inbox)["num_best_effort_rows"] == 1


@pytest.mark.parametrize("saved", [1.5, 2])
def test_the_less_of_a_step_is_left_the_more_must_have_been_saved(saved: float) -> None:
    with costed(overtake_share=500) as h:
        pair, inbox, _ = start_decoding(h)
        reach_segment(h, pair, inbox, 1)
        submit(h, pair, prompt_of(9, 60), max_tokens=5)
        h.scheduler["preemption_credit_ns"] = int(saved * DECODE_MS * MILLISECOND)
        entry = launch(h, pair, inbox)
        assert bool(entry["step_class"] == StepClass.URGENT) is (saved == 2), "half of the step is left"


def test_what_has_less_than_half_of_its_step_left_is_not_preempted() -> None:
    with costed(overtake_share=500) as h:
        pair, inbox, _ = start_decoding(h)
        reach_segment(h, pair, inbox, 2)
        submit(h, pair, prompt_of(9, 60), max_tokens=5)
        h.scheduler["preemption_credit_ns"] = SAVED_MS * MILLISECOND
        assert launch(h, pair, inbox)["segment"] == 3
        assert launch(h, pair, inbox)["num_tokens"] == 9 + 2


def test_who_holds_up_many_rows_pays_for_more() -> None:
    rows = 48
    roomy = {"max_sequences_per_worker": 64, "max_num_seqs": 64, "max_num_batched_tokens": 64, "num_blocks": 400}
    with costed(overtake_share=500, cq_entries=256, **roomy) as h:
        pair, inbox, _ = start_decoding(h)
        for i in range(rows - 2):
            submit(h, pair, prompt_of(2, i), max_tokens=200)
        while launch(h, pair, inbox)["num_decode_rows"] < rows:
            pass
        reach_segment(h, pair, inbox, 0)
        h.scheduler["preemption_credit_ns"] = SAVED_MS * MILLISECOND
        submit(h, pair, prompt_of(9, 60), max_tokens=5)
        assert launch(h, pair, inbox)["step_class"] == StepClass.URGENT
        paid = SAVED_MS - int(h.scheduler["preemption_credit_ns"]) / MILLISECOND
        assert paid == pytest.approx(DECODE_MS * rows / 32, rel=0.02)


def test_what_preempts_is_as_long_as_what_would_have_shared_the_step() -> None:
    """The automatic target is 15/8 of what decoding takes: 7.5 ms, of which a token takes half a millisecond."""
    with costed(overtake_share=500, max_num_batched_tokens=64, num_blocks=60) as h:
        pair, inbox, _ = start_decoding(h)
        reach_segment(h, pair, inbox, 0)
        submit(h, pair, prompt_of(20, 60), max_tokens=5)
        entry = launch(h, pair, inbox)
        assert (entry["step_class"], entry["num_segments"]) == (StepClass.URGENT, 0)
        assert int(h.geometry["graphs"][int(entry["graph"])]["tokens"]) <= 16


def test_prompts_take_no_more_than_their_share() -> None:
    with costed(overtake_share=100, max_sequences_per_worker=64, num_blocks=60) as h:
        pair, inbox, _ = start_decoding(h)
        began, preempting, open_ones = h.now, 0, dict.fromkeys((1, 37, 50), 0)
        for _ in range(800):
            for length, sequence in open_ones.items():  # two that decode for long, and one prompt after the other
                if not sequence or inbox.finish(sequence) is not None:
                    open_ones[length] = submit(h, pair, prompt_of(9), max_tokens=length, cached=False)
            preempting += launch(h, pair, inbox)["step_class"] == StepClass.URGENT
        assert (
            0.08
            < preempting * DECODE_MS * MILLISECOND / (h.now - began)
            < 0.1 + SAVED_MS * MILLISECOND / (h.now - began)
        )


def test_steps_are_launched_whole_again_when_no_prompt_has_come_for_long() -> None:
    with costed(overtake_share=500, num_blocks=400, max_num_batched_tokens=64) as h:
        pair, inbox, _ = start_decoding(h)
        reach_segment(h, pair, inbox, 0)
        h.scheduler["preemption_until"] = int(h.scheduler["step"])
        for _ in range(SEGMENTS - 1):
            launch(h, pair, inbox)
        fast_steps = int(h.scheduler["num_fast_steps"])
        for _ in range(10):
            assert launch(h, pair, inbox)["num_segments"] == 0
        assert int(h.scheduler["num_fast_steps"]) > fast_steps + 5


def test_no_step_is_cut_while_all_places_are_taken() -> None:
    with costed(overtake_share=500, max_num_seqs=2, num_blocks=60) as h:
        fill(h)
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, prompt_of(6, i), max_tokens=30) for i in range(6)]
        run_until_finished(h, inbox, [pair], sequences)
        assert not newest(h)["num_segments"] and not h.region.trace()["num_segments"].any()
