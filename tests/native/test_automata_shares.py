# SPDX-License-Identifier: Apache-2.0
"""Places of automata among flows: who takes all that it may leaves some for whoever comes, however long its answers."""

from __future__ import annotations

import numpy as np
import pytest

from blink.link.queue_pair import QueuePair
from harness import Harness, Inbox, expected_tokens, run_until_finished
from many_automata import LONG, PROMPT, VOCAB, ask, open_engine


def steps(h: Harness, inbox: Inbox, *pairs: QueuePair, count: int = 3) -> None:
    for _ in range(count):
        h.step()
        inbox.drain(*pairs)


def places(h: Harness, queue_pair: int = 0) -> dict[int, int]:
    """Return how many places each flow of a queue pair has."""
    flows = h.flows["num_automata"].reshape(-1, 256)[queue_pair]
    return {int(flow): int(flows[flow]) for flow in np.flatnonzero(flows)}


@pytest.mark.parametrize(("num_automata", "half"), [(2, 1), (7, 4), (8, 4), (16, 8)])
def test_one_flow_has_half_of_the_places_and_anothers_request_starts_at_once(num_automata: int, half: int) -> None:
    with open_engine(num_automata) as h:
        pair, inbox = h.frontend(), Inbox()
        greedy = [ask(pair, index, flow=1) for index in range(20)]
        steps(h, inbox, pair)
        assert places(h) == {1: half}
        assert [inbox.cached(each) is not None for each in greedy] == [True] * half + [False] * (20 - half)
        modest = ask(pair, 20, flow=2, count=3)
        steps(h, inbox, pair)
        assert inbox.tokens(modest), "it has its first token though none of the others' answers has ended"
        assert all(inbox.finish(each) is None for each in greedy)
        run_until_finished(h, inbox, [pair], [*greedy[: half + 1], modest])
        assert inbox.tokens(greedy[half]) == expected_tokens(PROMPT, LONG, VOCAB), "who waited has its turn"


def test_each_flow_that_comes_finds_places_while_the_ones_before_hold_theirs() -> None:
    with open_engine(16) as h:
        pair, other, inbox = h.frontend(0), h.frontend(1), Inbox()
        for index in range(10):
            ask(pair, index, flow=1)
        steps(h, inbox, pair)
        for index in range(10):
            ask(pair, 10 + index, flow=2)
        steps(h, inbox, pair)
        for index in range(5):
            ask(other, index, flow=1)
        steps(h, inbox, pair, other)
        assert places(h) == {1: 8, 2: 4} and places(h, 1) == {1: 2}
        last = ask(other, 20, flow=9)
        steps(h, inbox, pair, other)
        assert inbox.tokens(last)


def test_a_place_that_becomes_free_goes_to_who_has_fewer() -> None:
    with open_engine(3) as h:
        pair, inbox = h.frontend(), Inbox()
        first = [ask(pair, 0, flow=1, count=6), *(ask(pair, index, flow=1) for index in range(1, 8))]
        steps(h, inbox, pair)
        second = ask(pair, 8, flow=2)
        steps(h, inbox, pair, count=2)
        third = ask(pair, 9, flow=3, count=2)  # comes last, and no place is left
        assert places(h) == {1: 2, 2: 1} and inbox.finish(first[0]) is None
        steps(h, inbox, pair, count=6)
        assert inbox.finish(first[0]) is not None and inbox.tokens(third) and not inbox.tokens(first[2])
        run_until_finished(h, inbox, [pair], [*first[:3], second, third])


def test_any_number_of_a_flows_sequences_share_an_automatons_place() -> None:
    with open_engine(4) as h:
        pair, inbox = h.frontend(), Inbox()
        for index in (0, 1):
            ask(pair, index, flow=1)
        steps(h, inbox, pair)
        same = [ask(pair, index % 2, flow=1 + index % 3) for index in range(8)]
        steps(h, inbox, pair)
        assert places(h) == {1: 2} and all(inbox.tokens(each) for each in same)


@pytest.mark.parametrize("ends", ["is complete", "is cancelled"])
def test_a_place_stays_with_those_who_still_use_the_automaton(ends: str) -> None:
    with open_engine(4) as h:
        pair, inbox = h.frontend(), Inbox()
        first = ask(pair, 0, flow=5, count=6 if ends == "is complete" else LONG)
        steps(h, inbox, pair, count=1)
        heirs = [ask(pair, 0, flow=flow) for flow in (3, 2, 3)]
        steps(h, inbox, pair, count=2)
        assert places(h) == {5: 1}
        if ends == "is cancelled":
            pair.cancel(first)
        steps(h, inbox, pair, count=6)
        assert inbox.finish(first) is not None and places(h) == {2: 1}
        pair.cancel(heirs[1])
        steps(h, inbox, pair)
        assert places(h) == {3: 1} and int(h.scheduler["num_automata_used"]) == 1
        pair.cancel(heirs[0])
        steps(h, inbox, pair)
        assert places(h) == {3: 1}, "its other sequence goes on"
        run_until_finished(h, inbox, [pair], [heirs[2]])
        assert places(h) == {}


def test_an_automaton_that_nobody_uses_is_taken_again_within_the_share() -> None:
    with open_engine(4) as h:
        pair, inbox = h.frontend(), Inbox()
        for index in range(4):
            run_until_finished(h, inbox, [pair], [ask(pair, index, flow=1, count=2)])
        again = [ask(pair, index, flow=1) for index in range(4)]
        steps(h, inbox, pair)
        assert places(h) == {1: 2} and h.statistic("automata_loaded") == 4
        run_until_finished(h, inbox, [pair], again)
        assert h.statistic("automata_loaded") == 4


def test_a_parked_sequence_keeps_its_place() -> None:
    with open_engine(4, max_num_seqs=2) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = [ask(pair, index, flow=1, best_effort=True) for index in range(2)]
        steps(h, inbox, pair)
        urgent = ask(pair, 2, flow=2, count=4)
        steps(h, inbox, pair, count=2)
        assert h.statistic("num_parked") == 1 and places(h) == {1: 2, 2: 1}
        run_until_finished(h, inbox, [pair], [*slow, urgent])
        assert inbox.tokens(slow[1]) == expected_tokens(PROMPT, LONG, VOCAB) and places(h) == {}
