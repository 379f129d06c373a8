# SPDX-License-Identifier: Apache-2.0
"""What set-up says when the machine does not fit."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import pytest

from blink.errors import ConfigError
from blink.link.rdma.verbs import Device
from blink.link.rdma.verbs_link import VerbsLink

pytestmark = pytest.mark.rdma

_PR_CAPBSET_DROP, _CAP_IPC_LOCK = 24, 14
_REGISTER = """
import numpy as np
from blink.errors import ConfigError
from blink.link.rdma.message import RemoteMemory
from blink.link.rdma.verbs import Device, VerbsEnd
from blink.link.rdma.verbs_link import VerbsLink
memory = np.zeros(1 << 20, np.uint8)
end = VerbsEnd(Device(), VerbsLink(Device()).info())
try:
    end.offer(RemoteMemory(0, 64, memory.ctypes.data), RemoteMemory(64, len(memory), memory.ctypes.data))
except ConfigError as error:
    print(error)
"""


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="mlx5_9"):
        VerbsLink(Device("mlx5_9"))


def test_an_address_that_the_device_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="no address 200"):
        VerbsLink(Device(gid_index=200))


def test_the_limit_of_locked_memory_is_named() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK)  # the limit does not bind who may lock anything

    command = [sys.executable, "-c", _REGISTER]
    result = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=True)
    assert "cannot register 1048576 bytes" in result.stdout and "ulimit -l" in result.stdout
