# SPDX-License-Identifier: Apache-2.0
"""Busy neighbours as a context: they are at work inside of it and gone behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from flat.burn import Plan
from flat.kinds import NotMeasuredError


def program(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a module of this package."""
    paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    return [sys.executable, "-m", f"flat.{module}"], {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


class Neighbours:
    """The neighbours of a plan; none where their number is 0."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self.pgid = 0
        self.done: dict[str, Any] = {"alive": 0, "work": 0}  # known when they have ended

    def __enter__(self) -> Neighbours:
        """Start them; return when all are at work.

        Raises:
            NotMeasuredError: they cannot run here.
        """
        if self._plan.number:
            command, environment = program("burn")
            # A session of its own: Ctrl-C reaches this process alone.
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(self._plan))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            answer = self._read()
            if "pgid" not in answer:
                self._end()
                raise NotMeasuredError(answer.get("reason", "the neighbours' process died; its message is above"))
            self.pgid = answer["pgid"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._end()

    def go(self) -> None:
        """Let a plan of STOP begin."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(b"g")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def _end(self) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self.done |= self._read()
        self._process.wait()
        self._process.stdout.close()
