# SPDX-License-Identifier: Apache-2.0
"""Who runs when: order of admission, token budget, preemption by class, ageing."""

from __future__ import annotations

import pytest

from blink.region.layout import CONSTANTS, CqeKind
from harness import Inbox, expected_tokens, run_until_finished, running, small_config, submit

SECOND = 1000  # milliseconds
VOCAB = 97
RUNNING = 2


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


def test_a_long_prompt_is_computed_in_chunks_beside_a_decoding_sequence() -> None:
    with running(small_config(max_num_batched_tokens=16)) as h:
        pair, inbox = h.frontend(), Inbox()
        short = submit(h, pair, prompt_of(3), max_tokens=30)
        for _ in range(3):
            h.step()
        submit(h, pair, prompt_of(50, 7), max_tokens=2)
        h.step()  # reads the request
        inbox.drain(pair)
        chunks: list[int] = []
        while sum(chunks) < 50:
            before = len(inbox.tokens(short))
            h.step()
            inbox.drain(pair)
            chunks += [count for index, count in h.batch_rows() if index == 1]
            assert len(inbox.tokens(short)) == before + 1, "the decoding sequence stalls"
        assert chunks == [15, 15, 15, 5]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priority_orders_admission_only_under_the_priority_policy(policy: str) -> None:
    with running(small_config(max_num_seqs=1, scheduling_policy=policy)) as h:
        pair, inbox = h.frontend(), Inbox()
        order = [submit(h, pair, prompt_of(4, i), max_tokens=2, priority=p) for i, p in enumerate([0, 5, -5, 1])]
        run_until_finished(h, inbox, [pair], order)
        started = sorted(order, key=lambda sequence: int(inbox.completions[sequence][0]["time_ns"]))
        assert started == ([order[2], order[0], order[3], order[1]] if policy == "priority" else order)


def test_latency_sensitive_arrivals_take_places_of_best_effort_at_the_next_step() -> None:
    with running(small_config(max_num_seqs=2)) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = [submit(h, pair, prompt_of(4, i), max_tokens=20, best_effort=True) for i in range(2)]
        for _ in range(4):
            h.step()
        urgent = submit(h, pair, prompt_of(4, 9), max_tokens=3)
        h.step()  # reads the request
        h.step()  # composes with it
        assert {index for index, _ in h.batch_rows()} == {0, 2}
        run_until_finished(h, inbox, [pair], [*slow, urgent])
        for i, sequence in enumerate(slow):
            assert inbox.tokens(sequence) == expected_tokens(prompt_of(4, i), 20, VOCAB)


def test_parked_sequences_resume_without_recomputing_anything() -> None:
    with running(small_config(max_num_seqs=1)) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = submit(h, pair, prompt_of(20), max_tokens=20, best_effort=True)
        for _ in range(5):
            h.step()
        urgent = submit(h, pair, prompt_of(6, 9), max_tokens=4)
        run_until_finished(h, inbox, [pair], [slow, urgent])
        assert h.statistic("num_parked") == 1 and h.statistic("num_preemptions") == 0
        assert h.statistic("computed_tokens") == (20 + 19) + (6 + 3)  # each token once; the last is never computed
        assert inbox.tokens(slow) == expected_tokens(prompt_of(20), 20, VOCAB)


def test_latency_sensitive_arrivals_take_blocks_of_best_effort_by_recompute() -> None:
    with running(small_config(), num_blocks=8) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = submit(h, pair, prompt_of(30), max_tokens=30, best_effort=True, cached=False)
        for _ in range(4):
            h.step()
        urgent = submit(h, pair, prompt_of(30, 9), max_tokens=30, cached=False)
        h.step()
        h.step()
        assert [index for index, _ in h.batch_rows()] == [1]
        run_until_finished(h, inbox, [pair], [slow, urgent])
        assert h.statistic("num_preemptions") >= 1
        assert inbox.tokens(slow) == expected_tokens(prompt_of(30), 30, VOCAB)
        assert inbox.tokens(urgent) == expected_tokens(prompt_of(30, 9), 30, VOCAB)


def test_block_shortage_preempts_the_youngest_and_its_tokens_go_on() -> None:
    with running(small_config(), num_blocks=8) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, prompt_of(20, i), max_tokens=40, cached=False) for i in range(3)]
        preempted: set[int] = set()
        for _ in range(30):
            before = h.sequences["status"].copy()
            h.step()
            preempted |= {i for i in range(3) if before[i] == 2 and h.sequences["status"][i] == 1}
        assert preempted == {1} or preempted == {1, 2}
        run_until_finished(h, inbox, [pair], sequences)
        assert h.statistic("num_preemptions") >= 1
        told = [[int(token["rank"]) for token in inbox.of_kind(sequence, CqeKind.TOKEN)] for sequence in sequences]
        told = [[rank >> CONSTANTS["predicted_bits"] for rank in ranks] for ranks in told]
        assert all(counts[0] == 0 for counts in told)
        assert sum(map(sum, told)) == h.statistic("num_preemptions")
        for i, sequence in enumerate(sequences):
            assert inbox.tokens(sequence) == expected_tokens(prompt_of(20, i), 40, VOCAB)
            assert len(inbox.of_kind(sequence, CqeKind.ADMITTED)) == 1


def test_a_best_effort_request_older_than_the_cap_goes_before_younger_urgent_ones() -> None:
    with running(small_config(max_num_seqs=1, max_queue_age=30.0, lease_timeout=1000.0)) as h:
        pair, inbox = h.frontend(), Inbox()
        running_one = submit(h, pair, prompt_of(4), max_tokens=6)
        old = submit(h, pair, prompt_of(4, 3), max_tokens=2, best_effort=True)
        h.step()
        h.step(31 * SECOND)
        young = [submit(h, pair, prompt_of(4, 5 + i), max_tokens=2) for i in range(2)]
        run_until_finished(h, inbox, [pair], [running_one, old, *young])
        starts = [int(inbox.completions[sequence][0]["time_ns"]) for sequence in [old, *young]]
        assert starts == sorted(starts)


def test_running_long_does_not_protect_best_effort_from_preemption() -> None:
    with running(small_config(max_num_seqs=1, max_queue_age=30.0, lease_timeout=1000.0)) as h:
        pair = h.frontend()
        submit(h, pair, prompt_of(4), max_tokens=40, best_effort=True)
        for _ in range(3):
            h.step(20 * SECOND)
        submit(h, pair, prompt_of(4, 9), max_tokens=4)
        h.step()
        h.step()
        assert [index for index, _ in h.batch_rows()] == [1]


def test_a_request_without_a_slot_does_not_keep_parked_ones_from_running() -> None:
    """Two parked sequences hold both slots of the single place: an urgent arrival must wait, but not for ever."""
    with running(small_config(max_num_seqs=1, scheduling_policy="priority")) as h:
        pair, inbox = h.frontend(), Inbox()

        def submit_and_await_start(max_tokens: int, best_effort: bool, priority: int) -> int:
            sequence = submit(h, pair, prompt_of(4), max_tokens=max_tokens, best_effort=best_effort, priority=priority)
            for _ in range(20):
                h.step()
                if h.sequences["status"][sequence & 0xFFFFFFFF] == RUNNING:
                    return sequence
            raise AssertionError("not started")

        last = submit_and_await_start(20, True, 5)
        urgent = submit_and_await_start(4, False, 0)  # parks the first
        first = submit_and_await_start(20, True, 0)  # goes before the parked one when the urgent one has ended
        late = submit(h, pair, prompt_of(4), max_tokens=2)  # parks that one too, and finds no slot
        assert run_until_finished(h, inbox, [pair], [last, urgent, first, late]) < 100


def test_a_prefix_that_would_leave_too_few_blocks_is_not_begun() -> None:
    """Of ten blocks five hold the prefix, and as long as four are in use, the two behind it cannot be had."""
    shared = [(7 * i) % 97 for i in range(40)]
    with running(small_config(), num_blocks=10) as h:
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [submit(h, pair, shared, max_tokens=1)])
        other = submit(h, pair, [5] * 26, max_tokens=5, cached=False)
        h.step()
        late = submit(h, pair, shared + [3] * 16, max_tokens=1)
        for _ in range(3):
            h.step()
        inbox.drain(pair)
        assert inbox.finish(other) is None and inbox.cached(late) is None
        run_until_finished(h, inbox, [pair], [other, late])
        assert inbox.tokens(late) == expected_tokens(shared + [3] * 16, 1, 97) and h.statistic("num_preemptions") == 0
