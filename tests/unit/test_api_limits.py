# SPDX-License-Identifier: Apache-2.0
"""What a worker takes of the system for its connections, and what it leaves."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os, resource, sys
from blink.api.server import connection_limits
from blink.config import FrontendConfig
for asked in sys.argv[1:]:  # each in a process of its own: what is raised stays so
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        limits = connection_limits(FrontendConfig(max_connections=int(asked)))
        print(limits.max_connections, *resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        os._exit(0)
    os.wait()
"""
_GRANTED = {0: 236, 50: 50, 1000: 236}  # of 200 open files that may become 300


def test_connections_stay_below_the_limit_of_open_files_which_is_raised() -> None:
    command = [sys.executable, "-c", _PROGRAM, *map(str, _GRANTED)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert found == [f"{granted} 300 300" for granted in _GRANTED.values()]
