# SPDX-License-Identifier: Apache-2.0
"""The engine's control port: who gets a queue pair, and when it comes back. Ends of a connection are played."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar
from unittest.mock import Mock

import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import BlinkError, EngineUnavailableError
from blink.link.rdma import listener as rdma_listener
from blink.link.rdma.handshake import Descriptor, confirm, negotiate, parse_place
from blink.link.rdma.listener import RdmaListener
from blink.link.rdma.message import TIMEOUT, Lines, Message, RemoteMemory
from blink.rdma_config import RdmaConfig
from blink.region.memory import Region, create_region, publish_region
from ports import free_port

_TOKEN = "secret"
_PATIENCE = 4.0  # seconds: less than the grace of a frontend that never attaches


class PlayedEnd:
    """The engine's end of a connection over which nothing travels."""

    ends: ClassVar[list[PlayedEnd]] = []

    def __init__(self, config: RdmaConfig, peer: Message) -> None:
        assert config.rdma_backend == "verbs"
        self.peer = peer
        self.is_connected = self.is_closed = False
        self.ends.append(self)

    def offer(self, shared: RemoteMemory, pair: RemoteMemory) -> Message:
        shared.key, pair.key = 5, 6
        return {"number": len(self.ends)}

    def await_peer(self, lines: Lines) -> None:
        lines.receive()
        self.is_connected = True

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    name = f"listener-{os.getpid()}-{abs(hash(request.node.name)) % 10**8}"
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_queue_pairs=1, max_sequences_per_worker=8)
    geometry = build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=32)
    region = create_region(name, geometry, "none")
    publish_region(region, name)
    yield region
    region.path.unlink()
    region.close()


@pytest.fixture
def place(region: Region, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a listener lets frontends in."""
    monkeypatch.setenv("BLINK_RDMA_TOKEN", _TOKEN)
    monkeypatch.setattr(rdma_listener, "open_engine_end", PlayedEnd)
    monkeypatch.setattr(rdma_listener, "open_link", lambda _: closing_nothing())
    PlayedEnd.ends.clear()
    place = f"127.0.0.1:{free_port()}"
    config = EngineConfig(region=region.path.name.removeprefix("blink-"), rdma_listen=place)
    RdmaListener(config).start()
    return place


def closing_nothing() -> socket.socket:
    """Return what stands for the link by which the listener looks whether this machine has RDMA."""
    return socket.socket()


def ask(place: str, *, confirms: bool) -> Descriptor:
    with socket.create_connection(parse_place(place, "--rdma")) as control:
        lines = Lines(control)
        descriptor = negotiate(lines, _TOKEN, "verbs", {"who": "a frontend"})
        if confirms:
            confirm(lines)
        return descriptor


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_frontend_learns_where_its_queue_pair_is(place: str, region: Region) -> None:
    descriptor = ask(place, confirms=True)
    (end,) = PlayedEnd.ends
    wait_for(lambda: end.is_connected)
    assert end.peer == {"who": "a frontend"} and descriptor.end == {"number": 1}
    assert (descriptor.pair_index, descriptor.epoch) == (0, int(region.header["epoch"]))
    shared, pair = descriptor.shared, descriptor.pair
    assert (shared.start, shared.key, pair.start, pair.key) == (0, 5, int(region.header["queue_pairs_offset"]), 6)
    assert pair.bytes == int(region.header["queue_pair_bytes"]) and pair.address - shared.address == pair.start
    assert 0 < shared.bytes <= int(region.header["trace_offset"])


def test_the_queue_pair_of_a_frontend_that_did_not_connect_comes_back_at_once(place: str) -> None:
    ask(place, confirms=False)
    wait_for(lambda: PlayedEnd.ends[0].is_closed)
    ask(place, confirms=True)
    wait_for(lambda: PlayedEnd.ends[1].is_connected)
    assert not PlayedEnd.ends[1].is_closed


def test_the_queue_pair_of_a_frontend_that_the_scheduler_dropped_comes_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(place, confirms=True)
    wait_for(lambda: PlayedEnd.ends[0].is_connected)
    with pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
        ask(place, confirms=True)
    monkeypatch.setattr(rdma_listener, "_ATTACH_GRACE", 0.0)  # it never attached, as one whose lease expired
    ask(place, confirms=True)
    wait_for(lambda: PlayedEnd.ends[1].is_connected)
    assert PlayedEnd.ends[0].is_closed


def test_silent_connections_delay_nobody(place: str) -> None:
    address = parse_place(place, "--rdma")
    silent = [socket.create_connection(address) for _ in range(2 * rdma_listener._MAX_STRANGERS)]
    started = time.monotonic()
    assert ask(place, confirms=True).pair_index == 0
    assert time.monotonic() - started < TIMEOUT / 2, "it waited for a silent connection"
    # The threads of those that were shown out end a little later.
    wait_for(
        lambda: (
            sum(thread.name == "rdma-set-up" for thread in threading.enumerate()) <= rdma_listener._MAX_STRANGERS + 1
        )
    )
    for connection in silent:
        connection.close()


def test_a_system_without_descriptors_ends_no_listener(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(place, confirms=True)
    wait_for(lambda: PlayedEnd.ends[0].is_connected)
    accept, refused = rdma_listener.RdmaListener._accept, list[int]()

    def lack(listener: RdmaListener) -> None:
        if len(refused) < 2:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        accept(listener)

    monkeypatch.setattr(rdma_listener, "_ACCEPT_PAUSE", 0.01)
    monkeypatch.setattr(RdmaListener, "_accept", lack)
    for _ in range(2):  # the first is still served by the call that waited already
        with pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
            ask(place, confirms=True)
    assert len(refused) == 2


def test_a_frontend_too_many_is_told_so(place: str) -> None:
    ask(place, confirms=True)
    with pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
        ask(place, confirms=True)
    assert len(PlayedEnd.ends) == 1


def test_what_an_end_cannot_do_is_told_and_gives_the_queue_pair_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PlayedEnd, "offer", Mock(side_effect=BlinkError("no memory can be registered")))
        with pytest.raises(BlinkError, match="no memory can be registered"):
            ask(place, confirms=True)
    assert PlayedEnd.ends[0].is_closed
    assert ask(place, confirms=True).pair_index == 0
