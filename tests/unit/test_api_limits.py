# SPDX-License-Identifier: Apache-2.0
"""What a worker takes of the system for its connections, and what it leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
from blink.api.server import connection_limits
from blink.config import FrontendConfig
limits = connection_limits(FrontendConfig(max_connections=int(sys.argv[1])))
print(limits.max_connections, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("asked", "granted"), [(0, 236), (50, 50), (1000, 236)])
def test_connections_stay_below_the_limit_of_open_files_which_is_raised(asked: int, granted: int) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(asked)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert [int(word) for word in found] == [granted, 300, 300]
