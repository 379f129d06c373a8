# SPDX-License-Identifier: Apache-2.0
"""Events of the KV cache over ZeroMQ: what a plain subscriber gets is what vLLM sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from blink.config import EngineConfig
from blink.engine.kv_publisher import offset_port, open_publishers
from blink.errors import ConfigError
from blink.kv_events import read_kv_events
from blink.region.files import replica_rank
from cache_index import CacheIndex
from harness import Harness, Inbox, run_until_finished, running, small_config, submit
from kv_subscriber import Batch, Subscriber
from processes import wait_for

VOCAB = 97


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


class Publishing:
    """A scheduler, its publisher and a subscriber."""

    def __init__(self, harness: Harness, config: EngineConfig) -> None:
        self.h, self.events = harness, config.kv_events
        [self.publisher] = open_publishers(harness.region, config)
        self.pair = harness.frontend()
        self.subscriber = Subscriber(self.events.endpoint, self.events.replay_endpoint, "kv@")

    def complete(self, prompt: list[int]) -> None:
        inbox = Inbox()
        run_until_finished(self.h, inbox, [self.pair], [submit(self.h, self.pair, prompt, max_tokens=2)])

    def settle(self) -> None:
        """Wait until the publisher has taken all events; what it is asked then is answered after they are sent."""
        wait_for(lambda: self.publisher._ring._read == int(self.h.scheduler["events"]["written"]), 30)


@contextmanager
def publishing(folder: Path, **settings: Any) -> Iterator[Publishing]:
    usual = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events", "topic": "kv@host@model"}
    usual |= {"replay_endpoint": f"ipc://{folder}/replay"}
    config = small_config(kv_events_config=json.dumps(usual | settings))
    with running(config) as h:
        served = Publishing(h, config)
        try:
            yield served
        finally:
            served.publisher.close()
            served.subscriber.close()


def gather(batches: list[tuple[int, Batch]]) -> CacheIndex:
    """Return what a router knows that got these batches, which follow each other."""
    assert [number for number, _ in batches] == [*range(len(batches))]
    index = CacheIndex()
    for _, batch in batches:
        assert batch.ts > 1e9 and batch.data_parallel_rank == 0
        index.apply(batch.events)
    return index


def test_a_subscriber_hears_of_the_blocks_of_a_prompt(tmp_path: Path) -> None:
    with publishing(tmp_path) as served:
        served.publisher.start()
        heard = None
        for start in range(50):  # a subscription takes a while to arrive
            served.complete(prompt_of(30, start))
            served.settle()  # so that each prompt has a batch of its own
            heard = served.subscriber.next(200)
            if heard is not None and heard[0] > 0:  # the first batch is of no prompt
                break
        assert heard is not None
        assert served.subscriber.topics == {b"kv@host@model"}
        kind, hashes, parent, tokens, block_size, *rest = heard[1].events[-1]
        assert (kind, parent, block_size, rest) == ("BlockStored", None, 8, [None, "GPU", None])
        assert len(hashes) == 3 and tokens == prompt_of(24, heard[0] - 1)


def test_a_subscriber_that_comes_late_asks_for_what_it_missed(tmp_path: Path) -> None:
    with publishing(tmp_path) as served:
        served.publisher.start()
        for start in range(4):
            served.complete(prompt_of(30, start))
        served.settle()
        batches = served.subscriber.replay(0)
        index = gather(batches)
        assert batches[0][1].events == [["AllBlocksCleared"]], "what another engine had is void"
        assert len(index.blocks) == 12
        assert [number for number, _ in served.subscriber.replay(2)] == [*range(2, len(batches))]


def test_a_replay_holds_the_newest_batches(tmp_path: Path) -> None:
    with publishing(tmp_path, buffer_steps=2) as served:
        served.publisher.start()
        for start in range(4):
            served.complete(prompt_of(30, start))
            served.settle()
        numbers = [number for number, _ in served.subscriber.replay(0)]
        assert len(numbers) == 2 and numbers[1] == numbers[0] + 1


def test_a_publisher_that_does_not_run_delays_events_and_nothing_else(tmp_path: Path) -> None:
    with publishing(tmp_path) as served:
        for start in range(40):
            served.complete(prompt_of(60, start))
        assert served.h.statistic("evicted_blocks") > 0
        served.publisher.start()
        served.settle()
        index = gather(served.subscriber.replay(0))
        hashed = served.h.state.array("block_hashed", "u4").nonzero()[0]
        hashes = served.h.state.array("block_hashes", "u8").reshape(-1, 2)[hashed, 0]
        assert index.blocks.keys() == set(hashes.tolist())


def test_an_unknown_request_for_a_replay_is_ignored(tmp_path: Path) -> None:
    import zmq

    with publishing(tmp_path) as served:
        served.publisher.start()
        with closing(zmq.Context().socket(zmq.DEALER)) as stranger:
            stranger.connect(served.events.replay_endpoint)
            stranger.send_multipart((b"", b"what?"))
            assert gather(served.subscriber.replay(0)).num_clears == 1


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [("tcp://*:5557", 0, "tcp://*:5557"), ("tcp://*:5557", 3, "tcp://*:5560"), ("ipc:///a", 1, "ipc:///a_dp1")],
)
def test_engines_of_one_server_have_ports_of_their_own(endpoint: str, rank: int, expected: str) -> None:
    assert offset_port(endpoint, rank) == expected


def test_an_endpoint_without_a_port_is_one_engines() -> None:
    with pytest.raises(ConfigError, match="port"):
        offset_port("tcp://router", 1)
    assert [replica_rank(name) for name in ("blink", "blink.dp0", "blink.dp12", "a.dpx")] == [0, 0, 12, 0]


def test_an_endpoint_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with publishing(tmp_path) as served, pytest.raises(ConfigError, match="endpoint"):
        settings = {"enable_kv_cache_events": True, "endpoint": "tcp://*:x"}
        open_publishers(served.h.region, small_config(kv_events_config=json.dumps(settings)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_kv_cache_events": 1}, "must be a bool"),
        ({"publisher": "kafka"}, "publisher must be one of null, zmq"),
        ({"buffer_steps": 0}, "at least 1"),
        ({"port": 5557}, "has no 'port'"),
    ],
)
def test_settings_that_vllm_does_not_have_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kv_events(values)


@pytest.mark.parametrize("values", [{}, {"enable_kv_cache_events": True, "publisher": "null"}, {"publisher": "zmq"}])
def test_events_are_off_unless_asked_for(values: dict[str, Any]) -> None:
    config = small_config(kv_events_config=json.dumps(values))
    with running(config) as h:
        assert not h.geometry["num_kv_events"]
        assert open_publishers(h.region, config) == []


def test_vllms_own_settings_are_taken() -> None:
    read = read_kv_events({"enable_kv_cache_events": True, "replay_endpoint": None, "max_queue_size": 5, "hwm": 7})
    assert read.is_on and (read.endpoint, read.hwm, read.replay_endpoint) == ("tcp://*:5557", 7, "")
