# SPDX-License-Identifier: Apache-2.0
"""Programs that a test waits for and that work on while other tests wait: for the marker `early`, see conftest.py."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_EARLY = pytest.StashKey[list[Callable[[], None]]]()
ROOT = Path(__file__).resolve().parents[2]


def begin_early(config: pytest.Config, begin: Callable[[], None]) -> None:
    """Call `begin` before the first test, in the process of the tests that wait for it."""
    config.stash.setdefault(_EARLY, []).append(begin)


def begin_all(config: pytest.Config) -> None:
    """Begin what is to begin early, once."""
    for begin in config.stash.get(_EARLY, []):
        begin()
    config.stash[_EARLY] = []


class EarlyModule:
    """A Python module that runs as a program in the checkout, at a lower priority than the tests."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._command = ["nice", "-n", "5", sys.executable, "-m", *command]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        atexit.register(self._process.kill)

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return its exit status and what it printed."""
        assert self._process is not None, "begin() was not called"
        output, _ = self._process.communicate()
        return self._process.returncode, output
