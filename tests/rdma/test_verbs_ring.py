# SPDX-License-Identifier: Apache-2.0
"""The queue pair over one-sided RDMA, against a real scheduler in another process."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from blink.link.queue_pair import QueuePair, Submission
from blink.link.rdma.verbs import LinkCounters
from blink.link.rdma.verbs_link import VerbsLink
from blink.sampling_params import SamplingParams
from rdma_processes import attach, open_link, wait_for
from ring import Inspector, tail_first

pytestmark = pytest.mark.rdma

# Between two machines, which is a long test, more of them.
_REQUESTS = 300 if os.environ.get("BLINK_TEST_RDMA_ENGINE") else 80


def test_none_of_many_requests_is_torn_lost_or_repeated(engine_place: str) -> None:
    link = open_verbs(engine_place)
    inspector = Inspector(attach(link), link)
    inspector.run(_REQUESTS)
    counters = link.counters()
    link.close()
    print(f"{counters.writes} writes, {counters.reads} reads, {counters.completions} completions")
    assert inspector.answered == _REQUESTS and not inspector.faults, inspector.faults


def test_a_tail_before_its_prompt_is_found_out(engine_place: str) -> None:
    link = open_verbs(engine_place)
    inspector = Inspector(attach(tail_first(link)), link)
    for count in range(100, 5000, 100):  # until it was seen: it is a matter of luck
        inspector.run(count)
        if inspector.faults:
            break
    link.close()
    assert inspector.faults["wrong"] > 0


def test_one_completion_acknowledges_the_three_writes_of_a_submission(engine_place: str) -> None:
    link = open_verbs(engine_place)
    pair = attach(link)
    before = settled(link)
    submit(pair)
    after = settled(link)
    link.close()
    assert (after.writes - before.writes, after.completions - before.completions) == (3, 1)


def test_nothing_is_read_while_no_sequence_is_awaited(engine_place: str) -> None:
    link = open_verbs(engine_place)
    inspector = Inspector(attach(link), link)
    inspector.run(3)
    wait_for(lambda: not reads_within_a_second(link), "the end of the reads")
    assert not reads_within_a_second(link)
    link.close()


def open_verbs(place: str) -> VerbsLink:
    link = open_link(place)
    assert isinstance(link, VerbsLink)
    return link


def settled(link: VerbsLink) -> LinkCounters:
    """Return the counters once they stand still: all that was sent is acknowledged."""
    while True:
        before = link.counters()
        time.sleep(0.5)
        assert link.loss() is None  # takes what the device has finished
        if bytes(counters := link.counters()) == bytes(before):
            return counters


def reads_within_a_second(link: VerbsLink) -> int:
    before = link.counters().reads
    time.sleep(1)
    return link.counters().reads - before


def submit(pair: QueuePair) -> None:
    pair.submit(Submission(np.arange(500, dtype=np.int32), (), 0, b""), SamplingParams(max_tokens=1))
