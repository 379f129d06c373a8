# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent without a progress thread, and what UCX below it says of itself. Loads NIXL at the first use."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from blink.errors import BlinkError, ConfigError

_PATIENCE = 5.0  # seconds for one transfer
_MISSING = "--rdma-backend nixl needs NIXL, which cannot be loaded ({}): pip install 'blink-serve[nixl]'"
_COMPLAINT = re.compile(r"UCX +(?:WARN|ERROR) +(.*)")
# A table of UCX_PROTO_INFO: its title names agent, connection and operation; its rows end in the transports.
_TITLE = re.compile(r"\| (\w+) (\w+)[\w -]* cfg#\d+ *\|\n.*\| remote memory \w+ by ucp_(?:put|get)\*")
_TRANSPORT = re.compile(r"\b([a-z][a-z0-9_]*)/[\w.:-]+")
_LIST = re.compile(r"(?!all\b)[a-z]\w*(,(?!all\b)[a-z]\w*)*", re.ASCII)
# Transports whose target takes no part in a transfer. Of UCX's others, none is.
_ONE_SIDED = re.compile(r"(rc|dc)(_\w+)?|cma|xpmem|knem")


class TransferError(BlinkError):
    """A transfer did not end well."""


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


@functools.cache
def load_nixl() -> tuple[Any, UcxReport]:
    """Return NIXL's module, and the report of UCX below it.

    Raises:
        ConfigError: it is not installed.
    """
    report = UcxReport()
    os.environ.update(UCX_LOG_FILE=report.path, UCX_PROTO_INFO="y")  # UCX reads them when it is loaded
    # After a keepalive message, which only the engine's processor could answer, no transfer would end any more.
    os.environ["UCX_KEEPALIVE_INTERVAL"] = "inf"
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        return importlib.import_module("nixl._api"), report
    except ImportError as error:
        raise ConfigError(_MISSING.format(error)) from error


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


class Agent:
    """A NIXL agent with a UCX context of its own. Calls must not overlap."""

    def __init__(self, transports: str) -> None:
        """Create the agent.

        Raises:
            ConfigError: NIXL is not installed, or none of the transports can be used.
        """
        if not _LIST.fullmatch(transports):
            raise ConfigError(f"--nixl-transports must name transports of UCX, such as rc, got {transports!r}")
        nixl, self._report = load_nixl()
        os.environ["UCX_TLS"] = transports  # UCX reads it for each context, hence for each agent
        self._transports = transports
        self._name = f"blink{secrets.token_hex(8)}"
        self._peer: str | None = None
        # Without its thread; "strict" lets calls come from several threads, one at a time.
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
        try:
            self._agent: Any = nixl.nixl_agent(self._name, config)
            found = "UCX" in self._agent.backends
        except Exception as error:  # NIXL's errors have no base class of their own
            reason = self._report.complaint() or error
            raise ConfigError(f"NIXL cannot use --nixl-transports {transports}: {reason}") from error
        if not found:
            raise ConfigError("this build of NIXL has no UCX backend")

    def register(self, address: int, num_bytes: int) -> None:
        """Register memory for transfers.

        Raises:
            ConfigError: it cannot be registered.
        """
        try:
            self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot register {num_bytes} bytes of memory ({self._report.complaint() or error}); "
                "raise the limit of locked memory (`ulimit -l unlimited`)"
            ) from error

    def metadata(self) -> bytes:
        """Return what the peer must know of this agent, and of all memory registered so far."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> None:
        """Learn the peer's address and memory from its metadata.

        Raises:
            ConfigError: it is not that of an agent of this version.
        """
        try:
            self._peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise ConfigError(f"NIXL does not understand the engine's agent ({error}): other versions?") from error

    def progress(self) -> None:
        """Answer a peer that connects."""
        self._agent.get_new_notifs()

    def check_transports(self) -> None:
        """Check by which transports the peer's memory is reached, once it has been written and read.

        Raises:
            ConfigError: they are not allowed.
        """
        check_transports(transports_of(self._report.text(), self._name), self._transports)

    def transfer(self, operation: str, local: int, remote: int, num_bytes: int) -> None:
        """WRITE or READ the peer's memory, and wait until that is done at the peer too.

        Raises:
            TransferError: it failed, or took too long.
        """
        try:
            near, far = (self._agent.get_xfer_descs([(at, num_bytes, 0)], "DRAM") for at in (local, remote))
            handle = self._agent.initialize_xfer(operation, near, far, self._peer)
            self._await(handle)
            self._agent.release_xfer_handle(handle)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(str(error)) from error

    def _await(self, handle: Any) -> None:
        deadline = time.monotonic() + _PATIENCE
        spins, state = 0, self._agent.transfer(handle)
        while state == "PROC":
            spins += 1
            time.sleep(0 if spins < 200 else 20e-6)  # lets other threads of this process run
            if time.monotonic() > deadline:
                raise TransferError("no answer")
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError("the transfer failed")

    def close(self) -> None:
        """Take the registrations back and leave."""
        self._agent = None
