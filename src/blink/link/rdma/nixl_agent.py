# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent without a progress thread. Loads NIXL at the first use."""

from __future__ import annotations

import functools
import importlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from blink.errors import BlinkError, ConfigError
from blink.host.extras import how_to_install
from blink.link.rdma.ucx import UcxReport, check_transports, transports_of

_PATIENCE = 5.0  # seconds for one transfer
_LIST = re.compile(r"(?!all\b)[a-z]\w*(,(?!all\b)[a-z]\w*)*", re.ASCII)


class TransferError(BlinkError):
    """A transfer did not end well."""


class NixlAgent(Protocol):
    """What is used here of nixl_agent in nixl._api, whose wheel carries no types."""

    backends: Mapping[str, object]

    def register_memory(self, memory: list[tuple[int, int, int, str]], kind: str) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str: ...
    def get_new_notifs(self) -> object: ...
    def get_xfer_descs(self, memory: list[tuple[int, int, int]], kind: str) -> object: ...
    def initialize_xfer(self, operation: str, local: object, remote: object, peer: str) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...


@functools.cache
def load_nixl() -> tuple[ModuleType, UcxReport]:
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
        advice = how_to_install("nixl")
        raise ConfigError(f"--rdma-backend nixl needs NIXL, which cannot be loaded ({error}): {advice}") from error


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
        self._peer = ""
        # Without its thread; "strict" lets calls come from several threads, one at a time.
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
        try:
            self._open_agent: NixlAgent | None = nixl.nixl_agent(self._name, config)
            found = "UCX" in self._agent.backends
        except Exception as error:  # NIXL's errors have no base class of their own
            reason = self._report.complaint() or error
            raise ConfigError(f"NIXL cannot use --nixl-transports {transports}: {reason}") from error
        if not found:
            raise ConfigError("this build of NIXL has no UCX backend")

    @property
    def _agent(self) -> NixlAgent:
        assert self._open_agent is not None, "the agent was closed"
        return self._open_agent

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

    def _await(self, handle: object) -> None:
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
        self._open_agent = None
