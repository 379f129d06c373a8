# SPDX-License-Identifier: Apache-2.0
"""What UCX, below NIXL, says of the transports that it uses, and which of them will do."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable

from blink.errors import ConfigError

_COMPLAINT = re.compile(r"UCX +(?:WARN|ERROR) +(.*)")
# A table of UCX_PROTO_INFO: its title names agent, connection and operation; its rows end in the transports.
_TITLE = re.compile(r"\| (\w+) (\w+)[\w -]* cfg#\d+ *\|\n.*\| remote memory \w+ by ucp_(?:put|get)\*")
_TRANSPORT = re.compile(r"\b([a-z][a-z0-9_]*)/[\w.:-]+")
# Transports whose target takes no part in a transfer. Of UCX's others, none is.
_ONE_SIDED = re.compile(r"(rc|dc)(_\w+)?|cma|xpmem|knem")


class UcxReport:
    """A file in memory to which UCX writes what it decides and what it misses; no library call tells."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ucx-report")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def text(self) -> str:
        """Return all that UCX has written so far."""
        ctypes.CDLL(None).fflush(None)  # UCX writes through the C library's buffers
        return os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")

    def complaint(self) -> str:
        """Return the last warning or error; empty if there is none."""
        return next(iter(reversed(_COMPLAINT.findall(self.text()))), "")


def transports_of(report: str, agent: str) -> set[str]:
    """Return the transports by which UCX writes and reads the memory of the agent's peers."""
    found: set[str] = set()
    for title in _TITLE.finditer(report):
        if title[1] == agent and title[2] != "self":
            found.update(_TRANSPORT.findall(_rows(report[title.end() :])))
    return found


def _rows(rest: str) -> str:
    """Return the rows of the table whose title was just read."""
    frames = re.split(r"\+[-+]+\+", rest, maxsplit=3)
    return frames[2] if len(frames) > 2 else ""


def check_transports(used: Iterable[str], allowed: str) -> None:
    """Refuse what is not allowed, and what needs the engine's processor for each transfer.

    Raises:
        ConfigError: there is such a transport, or UCX names none.
    """
    names = sorted(used)
    if not names:
        raise ConfigError("NIXL does not tell which transport it uses; this version of UCX is not supported")
    for name in names:
        if not any(name == item or name.startswith(f"{item}_") for item in allowed.split(",")):
            raise ConfigError(f"NIXL uses the transport {name}, which --nixl-transports {allowed} does not allow")
        if not _ONE_SIDED.fullmatch(name):
            raise ConfigError(f"NIXL uses the transport {name}, for which the engine's processor would have to work")
