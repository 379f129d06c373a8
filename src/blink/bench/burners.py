# SPDX-License-Identifier: Apache-2.0
"""Busy neighbours: processes that compute or copy memory until they are killed or their parent ends.

Runs as `python -m blink.bench.burners` in each of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Final

from blink.errors import ConfigError
from blink.host.isolation import format_cpus, parse_cpus, pin
from blink.host.process import die_with_parent, read_available_memory

BUFFER_BYTES: Final = 256 << 20


class Burners:
    """A context in which `number` burners run, every second one copying. They end with it, or with this process."""

    def __init__(self, number: int, cpus: tuple[int, ...], buffer_bytes: int = BUFFER_BYTES) -> None:
        self._number = number
        self._cpus = cpus
        self._buffer_bytes = buffer_bytes
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Burners:
        """Start them; return when all are at work.

        Raises:
            ConfigError: their buffers do not fit into memory, or one cannot start.
        """
        needed, available = self._number // 2 * 2 * self._buffer_bytes, read_available_memory()
        if needed > available:
            text = f"{needed >> 20} MiB for its buffers, {available >> 20} MiB are available"
            raise ConfigError(f"--interference {self._number} needs {text}")
        try:
            for index in range(self._number):
                self._start("copy" if index % 2 else "compute")
            for process in self.processes:
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise ConfigError("a process of --interference could not start; its message is above")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill()

    def _start(self, work: str) -> None:
        command = [sys.executable, "-m", "blink.bench.burners", work, str(self._buffer_bytes)]
        command += [str(os.getpid()), format_cpus(self._cpus)]
        # A session of its own: Ctrl-C reaches the parent alone, which then ends all.
        self.processes.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        )

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def burn(work: str, buffer_bytes: int) -> None:
    """Compute or copy for ever; say so on standard output first."""
    if work == "copy":
        source = bytearray(b"\1") * buffer_bytes  # written once: pages of zeros would share one page of memory
        target = bytearray(buffer_bytes)
        print(work, flush=True)
        while True:
            target[:] = source
    print(work, flush=True)
    number = 1
    while True:
        number = (number * 1103515245 + 12345) & 0x7FFFFFFF


def main() -> None:
    """Burn as the arguments say: work, bytes of a buffer, parent's process id, cores."""
    work, buffer_bytes, parent, cpus = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    if cpus:
        pin(parse_cpus(cpus))
    burn(work, int(buffer_bytes))


if __name__ == "__main__":
    main()
