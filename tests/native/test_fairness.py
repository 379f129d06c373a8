# SPDX-License-Identifier: Apache-2.0
"""What one flow's requests cost another's: shares of places and of prompt tokens, whatever each of them asks for."""

from __future__ import annotations

import pytest

from blink.region.layout import CqeKind
from harness import Harness, Inbox, QueuePair, expected_tokens, run_until_finished, running, small_config, submit

SECOND = 1000  # milliseconds
VOCAB = 97


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


def order_of_starts(inbox: Inbox, sequences: list[int]) -> list[int]:
    """Return the sequences in the order in which they were admitted."""
    return sorted(sequences, key=lambda sequence: int(inbox.of_kind(sequence, CqeKind.ADMITTED)[0]["time_ns"]))


def test_flows_of_equal_requests_take_turns() -> None:
    with running(small_config(max_num_seqs=1, max_sequences_per_worker=16)) as h:
        pair, inbox = h.frontend(), Inbox()
        greedy = [submit(h, pair, prompt_of(9, i), max_tokens=4, flow=1, cached=False) for i in range(5)]
        modest = [submit(h, pair, prompt_of(9, i), max_tokens=4, flow=2, cached=False) for i in range(3)]
        run_until_finished(h, inbox, [pair], [*greedy, *modest])
        expected = [x for both in zip(greedy, modest, strict=False) for x in both] + greedy[3:]
        assert order_of_starts(inbox, [*greedy, *modest]) == expected


def test_queue_pairs_are_flows_apart_though_they_name_none() -> None:
    with running(small_config(max_num_seqs=1)) as h:
        busy, late, first, second = h.frontend(0), h.frontend(1), Inbox(), Inbox()
        many = [submit(h, busy, prompt_of(9, i), max_tokens=4) for i in range(6)]
        for _ in range(8):  # the first runs, or has ended
            h.step()
        one = submit(h, late, prompt_of(9, 7), max_tokens=4)
        run_until_finished(h, second, [late], [one])
        first.drain(busy)
        assert sum(first.finish(sequence) is not None for sequence in many) <= 3
        assert second.tokens(one) == expected_tokens(prompt_of(9, 7), 4, VOCAB)


def steps_to_first_token(h: Harness, pair: QueuePair, flow: int) -> int:
    inbox = Inbox()
    sequence = submit(h, pair, prompt_of(20, 3), max_tokens=3, flow=flow)
    for steps in range(300):
        if inbox.tokens(sequence):
            return steps
        h.step()
        inbox.drain(pair)
    raise AssertionError("the request starves")


@pytest.mark.parametrize("shape", ["many", "long prompts", "first by priority"])
def test_the_largest_use_of_one_flow_delays_anothers_first_token_by_one_turn(shape: str) -> None:
    """A turn: until one of the places is free, and as many steps as a share of the prompt tokens needs."""
    config = small_config(max_num_seqs=4, max_sequences_per_worker=64, scheduling_policy="priority")
    with running(config, num_blocks=64) as h:
        pair = h.frontend()
        length, count, max_tokens = (58, 2, 4) if shape == "long prompts" else (9, 1, 12)
        for i in range(40):
            submit(h, pair, prompt_of(length, i), max_tokens=max_tokens, flow=1, cached=False)
        for _ in range(6):
            pair.renew_lease()
            pair.drain()
            h.step()
        turn = 4 * count + max_tokens + 3
        assert steps_to_first_token(h, pair, flow=2) <= turn
        assert steps_to_first_token(h, pair, flow=1) > turn, "the flow itself queues behind its own requests"


def test_a_step_divides_its_prompt_tokens_among_flows_and_wastes_none() -> None:
    with running(small_config(max_num_batched_tokens=32), num_blocks=64) as h:
        pair = h.frontend()
        for flow, length in ((1, 60), (1, 60), (2, 60), (3, 5)):
            submit(h, pair, prompt_of(length, flow), max_tokens=2, flow=flow, cached=False)
        h.step()
        # Shares of 10, of which the last flow needs 5; the rest goes to the first two, who have cost the same.
        assert h.batch_rows() == [(0, 10), (2, 10), (3, 5), (1, 7)]
        h.step()
        rows = dict(h.batch_rows())
        assert rows[3] == 1 and sum(rows.values()) == 32 and min(rows[2], rows.get(0, 0) + rows.get(1, 0)) >= 15


def test_what_other_flows_leave_of_a_step_is_used() -> None:
    with running(small_config(max_num_batched_tokens=32), num_blocks=64) as h:
        pair = h.frontend()
        for flow, length in ((1, 60), (2, 5), (3, 3)):
            submit(h, pair, prompt_of(length, flow), max_tokens=2, flow=flow, cached=False)
        h.step()
        assert dict(h.batch_rows()) == {0: 24, 1: 5, 2: 3}


def test_a_flow_that_comes_back_has_no_credit_from_its_absence() -> None:
    with running(small_config(max_num_seqs=1, max_sequences_per_worker=32)) as h:
        pair, inbox = h.frontend(), Inbox()
        for i in range(6):  # the first flow pays for work that nobody else wanted
            run_until_finished(h, inbox, [pair], [submit(h, pair, prompt_of(9, i), max_tokens=9, flow=1)])
        steady = [submit(h, pair, prompt_of(9, i), max_tokens=4, flow=1, cached=False) for i in range(4)]
        back = [submit(h, pair, prompt_of(9, i), max_tokens=4, flow=2, cached=False) for i in range(4)]
        run_until_finished(h, inbox, [pair], [*steady, *back])
        starts = order_of_starts(inbox, [*steady, *back])
        assert [sequence in back for sequence in starts[:4]].count(True) == 2, "they take turns at once"


def test_an_aged_request_takes_the_place_of_a_later_one_that_got_ahead() -> None:
    config = small_config(
        max_num_seqs=1, max_queue_age=30.0, lease_timeout=1000.0, scheduling_policy="priority", max_num_batched_tokens=8
    )
    with running(config) as h:
        pair, inbox = h.frontend(), Inbox()
        first = submit(h, pair, prompt_of(4), max_tokens=2)
        old = submit(h, pair, prompt_of(4, 3), max_tokens=2)
        ahead = submit(h, pair, prompt_of(4, 5), max_tokens=50, priority=-(2**31), flow=1)
        while int(h.sequences[2]["num_generated"]) == 0:
            inbox.drain(pair)
            h.step()
        assert inbox.cached(old) is None
        h.step(31 * SECOND)
        for _ in range(8):
            inbox.drain(pair)
            h.step()
        inbox.drain(pair)
        assert inbox.tokens(old) == expected_tokens(prompt_of(4, 3), 2, VOCAB)
        assert inbox.finish(ahead) is None and h.statistic("num_parked") >= 1
        run_until_finished(h, inbox, [pair], [first, old, ahead])
        assert inbox.tokens(ahead) == expected_tokens(prompt_of(4, 5), 50, VOCAB)


def test_a_deep_queue_that_has_aged_does_not_go_before_anothers_request() -> None:
    config = small_config(max_num_seqs=2, max_sequences_per_worker=32, max_queue_age=0.02)
    with running(config) as h:
        pair, inbox = h.frontend(), Inbox()
        many = [submit(h, pair, prompt_of(9, i), max_tokens=8, flow=1, cached=False) for i in range(12)]
        while sum(inbox.finish(sequence) is not None for sequence in many) < 4:
            inbox.drain(pair)
            h.step(5)
        one = submit(h, pair, prompt_of(9, 3), max_tokens=2, flow=2)
        left = [sequence for sequence in many if inbox.cached(sequence) is None]
        assert len(left) >= 4, "some of them have waited for too long"
        run_until_finished(h, inbox, [pair], [*many, one])
        ahead = order_of_starts(inbox, [*left, one]).index(one)
        assert ahead <= 2, "it waits for the turn that had begun"


def test_an_aged_request_waits_for_those_that_came_before_it() -> None:
    with running(small_config(max_num_seqs=1, max_queue_age=30.0, lease_timeout=1000.0)) as h:
        pair, inbox = h.frontend(), Inbox()
        early = submit(h, pair, prompt_of(4), max_tokens=40)
        late = submit(h, pair, prompt_of(4, 3), max_tokens=2)
        for _ in range(3):
            h.step(31 * SECOND)
        run_until_finished(h, inbox, [pair], [early, late])
        assert h.statistic("num_parked") == 0
