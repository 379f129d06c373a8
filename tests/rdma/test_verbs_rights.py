# SPDX-License-Identifier: Apache-2.0
"""What a frontend's keys open, and what they do not: checked by the RDMA device, not by the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from blink.link.rdma.handshake import RefusedError
from blink.link.rdma.link import RdmaLink
from blink.link.rdma.verbs import Device
from blink.link.rdma.verbs_link import VerbsLink
from rdma_processes import ask, attach, open_link, wait_for

pytestmark = pytest.mark.rdma

_REFUSED = "remote access error"


@pytest.fixture
def link(engine_place: str) -> Iterator[RdmaLink]:
    link = open_link(engine_place)
    yield link
    link.close()


def test_writing_behind_the_own_queue_pair_is_refused(link: RdmaLink) -> None:
    end = link.addresses.base + int(link.header["queue_pair_bytes"])
    link.write(end - 4, bytes(8))
    wait_for(link.loss, "the refusal")
    assert _REFUSED in str(link.loss())


def test_reading_behind_the_own_queue_pair_is_refused(link: RdmaLink) -> None:
    end = link.addresses.base + int(link.header["queue_pair_bytes"])
    assert not link.read(end - 4, np.zeros(8, np.uint8))
    assert _REFUSED in link.failure()


def test_writing_the_engines_own_words_is_refused(link: RdmaLink) -> None:
    link.store_word(0, 0)
    wait_for(link.loss, "the refusal")
    assert _REFUSED in str(link.loss())


def test_reading_behind_the_control_block_is_refused(link: RdmaLink) -> None:
    assert not link.read(int(link.header["trace_offset"]), np.zeros(8, np.uint8))
    assert _REFUSED in link.failure()


def test_the_keys_of_another_frontend_open_nothing(engine_place: str) -> None:
    first, thief = VerbsLink(Device()), VerbsLink(Device())
    theirs, own = ask(engine_place, first), ask(engine_place, thief)
    first.connect(theirs)
    assert theirs.pair.address != own.pair.address and theirs.pair.key != own.pair.key
    thief.connect(replace(own, pair=theirs.pair, pair_index=theirs.pair_index))
    thief.store_word(thief.addresses.lease, 1)
    wait_for(thief.loss, "the refusal")
    assert _REFUSED in str(thief.loss())
    assert first.loss() is None
    attach(first)
    first.close()
    thief.close()


def test_a_wrong_token_is_refused(engine_place: str) -> None:
    link = VerbsLink(Device())
    with pytest.raises(RefusedError, match="token"):
        ask(engine_place, link, "another token")
    link.close()
