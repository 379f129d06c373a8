# SPDX-License-Identifier: Apache-2.0
"""What a frontend's keys open, and what they do not: checked by the RDMA device, not by the frontend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blink.link.rdma.connector import RdmaConnection
from blink.link.rdma.handshake import RefusedError
from blink.link.rdma.verbs import Channel, Device
from rdma_processes import ask, attach, open_connection, wait_for

pytestmark = pytest.mark.rdma

_REFUSED = "remote access error"


@pytest.fixture
def connection(engine_place: str):
    connection = open_connection(engine_place)
    yield connection
    connection.close()


def test_writing_behind_the_own_queue_pair_is_refused(connection: RdmaConnection) -> None:
    end = connection.addresses.base + int(connection.header["queue_pair_bytes"])
    connection.transport.write(end - 4, bytes(8))
    wait_for(connection.loss, "the refusal")
    assert _REFUSED in str(connection.loss())


def test_reading_behind_the_own_queue_pair_is_refused(connection: RdmaConnection) -> None:
    end = connection.addresses.base + int(connection.header["queue_pair_bytes"])
    assert not connection.channel.read(end - 4, np.zeros(8, np.uint8))
    assert _REFUSED in connection.channel.failure()


def test_writing_the_engines_own_words_is_refused(connection: RdmaConnection) -> None:
    connection.transport.store_word(0, 0)
    wait_for(connection.loss, "the refusal")
    assert _REFUSED in str(connection.loss())


def test_reading_behind_the_control_block_is_refused(connection: RdmaConnection) -> None:
    assert not connection.channel.read(int(connection.header["trace_offset"]), np.zeros(8, np.uint8))
    assert _REFUSED in connection.channel.failure()


def test_the_keys_of_another_frontend_open_nothing(engine_place: str) -> None:
    first, second = Channel(Device()), Channel(Device())
    theirs, own = ask(engine_place, first), ask(engine_place, second)
    first_connection = RdmaConnection(first, theirs)
    assert theirs.pair.address != own.pair.address and theirs.pair.key != own.pair.key
    thief = RdmaConnection(second, replace(own, pair=theirs.pair, pair_index=theirs.pair_index))
    thief.transport.store_word(thief.addresses.lease, 1)
    wait_for(thief.loss, "the refusal")
    assert _REFUSED in str(thief.loss())
    assert first_connection.loss() is None
    attach(first_connection)
    first_connection.close()
    thief.close()


def test_a_wrong_token_is_refused(engine_place: str) -> None:
    channel = Channel(Device())
    with pytest.raises(RefusedError, match="token"):
        ask(engine_place, channel, "another token")
    channel.close()
