# SPDX-License-Identifier: Apache-2.0
"""What set-up says when the machine does not fit."""

from __future__ import annotations

import ctypes
import resource
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import pytest

from blink.errors import ConfigError
from blink.link.rdma.message import RemoteMemory
from blink.link.rdma.verbs import Device, VerbsEnd
from blink.link.rdma.verbs_link import VerbsLink

pytestmark = pytest.mark.rdma
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="mlx5_9"):
        VerbsLink(Device("mlx5_9"))


def test_an_address_that_the_device_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="no address 200"):
        VerbsLink(Device(gid_index=200))


def register_little(told: Connection) -> None:
    """Register memory in a process that may lock 64 KiB, and tell what that says."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    # The limit does not bind who may lock anything.
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()) == 0
    memory = np.zeros(1 << 20, np.uint8)
    end = VerbsEnd(Device(), VerbsLink(Device()).info())
    with pytest.raises(ConfigError) as refusal:
        end.offer(RemoteMemory(0, 64, memory.ctypes.data), RemoteMemory(64, len(memory), memory.ctypes.data))
    told.send(str(refusal.value))


def test_the_limit_of_locked_memory_is_named() -> None:
    processes = get_context("fork")  # what it needs is loaded, which takes the rig's processor ten seconds
    heard, told = processes.Pipe(duplex=False)
    child = processes.Process(target=register_little, args=(told,))
    child.start()
    told.close()
    said = heard.recv()
    child.join()
    assert "cannot register 1048576 bytes" in said and "ulimit -l" in said
