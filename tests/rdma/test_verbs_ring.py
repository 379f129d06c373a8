# SPDX-License-Identifier: Apache-2.0
"""The queue pair over one-sided RDMA, against a real scheduler in another process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from blink.link.rdma.connector import RdmaConnection
from blink.link.rdma.verbs import ChannelCounters
from blink.region.queue_pair import QueuePair, Submission
from blink.sampling_params import SamplingParams
from rdma_processes import attach, open_connection, wait_for
from ring import Inspector, TailFirst

pytestmark = pytest.mark.rdma

_REQUESTS = 1000


def test_a_thousand_requests_and_none_is_torn_lost_or_repeated(engine_place: str) -> None:
    connection = open_connection(engine_place)
    inspector = Inspector(attach(connection), connection)
    inspector.run(_REQUESTS)
    counters = connection.channel.counters()
    connection.close()
    print(f"{counters.writes} writes, {counters.reads} reads, {counters.completions} completions")
    assert inspector.answered == _REQUESTS and not inspector.faults, inspector.faults


def test_a_tail_before_its_prompt_is_found_out(engine_place: str) -> None:
    connection = open_connection(engine_place)
    inspector = Inspector(attach(connection, TailFirst(connection)), connection)
    inspector.run(_REQUESTS // 10)
    connection.close()
    assert inspector.faults["wrong"] > 0


def test_one_completion_acknowledges_the_three_writes_of_a_submission(engine_place: str) -> None:
    connection = open_connection(engine_place)
    pair = attach(connection)
    before = settled(connection)
    submit(pair)
    after = settled(connection)
    connection.close()
    assert (after.writes - before.writes, after.completions - before.completions) == (3, 1)


def test_nothing_is_read_while_no_sequence_is_awaited(engine_place: str) -> None:
    connection = open_connection(engine_place)
    inspector = Inspector(attach(connection), connection)
    inspector.run(3)
    wait_for(lambda: not reads_within_a_second(connection), "the end of the reads")
    assert not reads_within_a_second(connection)
    connection.close()


def settled(connection: RdmaConnection) -> ChannelCounters:
    """Return the counters once they stand still: all that was sent is acknowledged."""
    while True:
        before = connection.channel.counters()
        time.sleep(0.5)
        assert connection.loss() is None  # takes what the device has finished
        if bytes(counters := connection.channel.counters()) == bytes(before):
            return counters


def reads_within_a_second(connection: RdmaConnection) -> int:
    before = connection.channel.counters().reads
    time.sleep(1)
    return connection.channel.counters().reads - before


def submit(pair: QueuePair) -> None:
    pair.submit(Submission(np.arange(500, dtype=np.int32), (), 0, b""), SamplingParams(max_tokens=1))
