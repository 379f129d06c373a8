# SPDX-License-Identifier: Apache-2.0
"""A frontend's client of the engine: attaches a queue pair, keeps its lease, notices when the engine goes.

Not thread-safe; never blocks for more than a few milliseconds. After a loss it reconnects by itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink.errors import BlinkError, EngineUnavailableError
from blink.grammar.automaton import Automaton
from blink.host.heartbeat import HeartbeatAge
from blink.link.base import Connector, Link
from blink.link.queue_pair import NO_ORIGIN, KvOrigin, QueuePair, Submission
from blink.region.layout import COMPLETION, EngineState, ErrorCode, Opcode, Task
from blink.region.report import engine_stats
from blink.sampling_params import SamplingParams
from blink.speculation import is_speculating

ATTACH_WAIT = 0.02  # seconds
_POLL_INTERVAL_US = 50
_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a frontend needs to know of its engine."""

    max_model_len: int
    vocab_size: int
    block_size: int
    model: str
    hash_key: bytes
    max_sequences: int
    prefix_caching: bool
    scheduling_policy: str
    num_queue_pairs: int
    can_constrain: bool = False  # whether it knows the bytes of its tokens
    speculates: bool = False  # whether it reads predictions
    task: Task = Task.GENERATE
    vector_width: int = 0  # floats that each prompt becomes; 0: prompts are continued
    normalizes_vectors: bool = False  # unless a request asks for others
    num_adapters: int = 0  # that it holds at once; 0: it takes none

    @property
    def longest_prompt(self) -> int:
        """Return the tokens that a prompt may have: one that is continued leaves a place for the first new token."""
        return self.max_model_len - (self.task == Task.GENERATE)


class EngineClient:
    """Hold one queue pair of whatever engine serves now: at the end of a connector."""

    def __init__(
        self,
        connector: Connector,
        engine_timeout: float,
        poll_interval_us: int = _POLL_INTERVAL_US,
        lease_grace: float = 0.0,
        attach_wait: float = ATTACH_WAIT,
    ) -> None:
        """Prepare to connect; the lease is also kept for `lease_grace` seconds after a tick() without another.

        attach_wait: seconds that a tick() may wait for the scheduler's answer.
        """
        self._connector = connector
        self._engine_timeout = engine_timeout
        self._poll_interval_us = poll_interval_us
        self._lease_grace = lease_grace
        self._attach_wait = attach_wait
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._link: Link | None = None
        self._pair: QueuePair | None = None
        self._heartbeat = 0
        self._heartbeat_age = HeartbeatAge()
        self.ready = False
        self.unavailable_reason = "the engine is not running or still starting"
        self.info: RegionInfo | None = None
        self.silent_seconds = 0.0  # since the engine's last sign of life

    def fileno(self) -> int:
        """Return an eventfd that is readable when completions may be waiting."""
        return self._event_fd

    @property
    def fingerprint(self) -> str:
        """What decides the bits of answers, as the engine tells it; empty: other requests do, too."""
        return bytes(self._link.header["fingerprint"]).decode() if self._link is not None else ""

    @property
    def tick_seconds(self) -> float:
        """Seconds until the next tick(): fewer while there is no engine."""
        return _TICK_SECONDS if self.ready else min(_TICK_SECONDS, self._connector.retry_seconds)

    def tick(self) -> str | None:
        """Renew the lease and watch the engine; call it again after `tick_seconds`.

        Returns the reason when every outstanding sequence was lost since the last call, else None.
        """
        lost = None
        if self.ready and (lost := self._loss()):
            self._disconnect(lost)
        if not self.ready:
            self._connect()
        if self._pair is not None and self.ready:
            self._pair.keep_lease(self._lease_grace)
            self._pair.flush_cancels()
        return lost

    def submit(
        self,
        prompt: np.ndarray[Any, Any],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: Sequence[int] = (),
        block_hashes: bytes = b"",
        origin: KvOrigin = NO_ORIGIN,
        flow: int = 0,
        automaton: Automaton | None = None,
        prediction: Sequence[int] | np.ndarray[Any, Any] = (),
    ) -> int:
        """Queue one sequence of a flow and return its id; with a hash root, its answer is cached too.

        automaton: what its text may look like; prediction: tokens that its answer may have much of.

        Raises:
            OverloadedError: the engine's queue for this worker is full.
            EngineUnavailableError: no engine is ready.
        """
        if self._link is None or self._pair is None or not self.ready or self.info is None:
            raise EngineUnavailableError(self.unavailable_reason)
        if self._link.state() not in (EngineState.READY, EngineState.PAUSED):
            raise EngineUnavailableError("the engine is shutting down")
        stops = dict.fromkeys([*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)])
        hashes = block_hashes if self.info.prefix_caching else b""
        entry = Submission(prompt, list(stops), seed, hashes, flow, origin, automaton, prediction)
        sequence = self._pair.submit(entry, params)
        self._expect()
        return sequence

    def cancel(self, sequence: int) -> None:
        """End a sequence early; unknown ids are ignored."""
        if self._pair is not None:
            self._pair.cancel(sequence)

    def read_word(self, find: Callable[[np.void | np.ndarray[Any, Any]], int]) -> int:
        """Return the word of the engine's region at the offset found in its header; 0 while no engine is ready."""
        return self._link.load_word(find(self._link.header)) if self._link is not None and self.ready else 0

    def order(self, opcode: Opcode, **fields: int) -> None:
        """Ask something of the whole engine, in an entry with these fields; statistics show when it is done.

        Raises:
            EngineUnavailableError: no engine is ready.
            OverloadedError: the submission queue is full.
        """
        if self._pair is None or not self.ready:
            raise EngineUnavailableError(self.unavailable_reason)
        self._pair.order(opcode, **fields)

    @property
    def is_paused(self) -> bool:
        """Whether the engine launches nothing, since somebody paused it or it lacks something."""
        return self._link is not None and self._link.report()["state"] == EngineState.PAUSED

    @property
    def absent(self) -> int:
        """What the engine's model lacks: bits of layout.Absent."""
        return 0 if self._link is None else int(self._link.report()["absent"])

    def drain(self) -> np.ndarray[Any, Any]:
        """Return the completions that have arrived (dtype layout.COMPLETION; valid until the next call)."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        if self._pair is None or not self.ready:
            return np.zeros(0, COMPLETION)
        completions = self._pair.drain()
        self._expect()
        return completions

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and gauges and this queue pair's; empty when there is no engine."""
        if self._link is None or self._pair is None:
            return {}
        found = engine_stats(self._link.report(), self._link.geometry)
        found["worker_sequences"] = self._pair.num_live
        found["prompt_arena_used_bytes"] = self._pair.arena_used_bytes
        return found

    def queue(self) -> tuple[int, int]:
        """Return how many sequences of all frontends run in the engine, and how many wait there."""
        if self._link is None:
            return 0, 0
        statistics = self._link.report()["statistics"]
        return int(statistics["num_running"]), int(statistics["num_waiting"])

    def close(self) -> None:
        """Give the queue pair back; its sequences end."""
        self._disconnect("closed")
        os.close(self._event_fd)

    def _expect(self) -> None:
        if self.ready and self._link is not None and self._pair is not None:
            self._link.expect(self._pair.head, self._pair.num_live > 0)

    def _connect(self) -> None:
        try:
            if self._link is not None or self._open():
                self._attach()
        except BlinkError as error:
            self.unavailable_reason = error.message
            self._release()

    def _open(self) -> bool:
        link = self._connector.open()
        if link is None:
            return False
        self._link = link
        self._pair = QueuePair(link)
        self._heartbeat = int(link.report()["heartbeat"])
        self._heartbeat_age = HeartbeatAge()
        self._pair.request_attach()
        return True

    def _attach(self) -> None:
        assert self._link is not None and self._pair is not None
        deadline = time.monotonic() + self._attach_wait
        while not self._pair.is_attached():
            if time.monotonic() < deadline:
                time.sleep(0.001)
                continue
            if reason := self._loss(attaching=True):
                raise EngineUnavailableError(reason)
            self.unavailable_reason = "the engine is starting"
            return
        self._pair.start()
        self.info = _region_info(self._link)
        self._link.notify(self._event_fd, self._pair.head, self._poll_interval_us)
        self._heartbeat_age = HeartbeatAge()
        self.ready = True
        self.unavailable_reason = ""

    def _loss(self, attaching: bool = False) -> str | None:
        """Say why the engine or the queue pair is gone; None while all is well."""
        assert self._link is not None and self._pair is not None
        words = self._link.report()
        if words["state"] == EngineState.FAILED:
            return f"the engine failed: {ErrorCode(int(words['error_code'])).name}"
        if words["state"] == EngineState.STOPPED:
            return "the engine was stopped"
        if lost := self._link.loss():
            return lost
        heartbeat = int(words["heartbeat"])
        silent = self._heartbeat_age.look(time.monotonic(), heard=heartbeat != self._heartbeat)
        self._heartbeat, self.silent_seconds = heartbeat, silent
        if silent > self._engine_timeout:
            return f"the engine has given no sign of life for {self._engine_timeout:g} s"
        if not attaching and not self._pair.is_attached():
            return "this frontend was silent, or left its completions unread, for too long and lost its lease"
        return None

    def _disconnect(self, reason: str) -> None:
        self.ready = False
        self.unavailable_reason = reason
        self._release()

    def _release(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._pair = None


def _region_info(link: Link) -> RegionInfo:
    geometry, header = link.geometry, link.header
    return RegionInfo(
        max_model_len=int(geometry["max_model_len"]),
        vocab_size=int(geometry["vocab_size"]),
        block_size=int(geometry["block_size"]),
        model=bytes(header["model"]).decode(),
        hash_key=header["hash_key"].tobytes(),
        max_sequences=int(geometry["sequences_per_queue_pair"]),
        prefix_caching=bool(geometry["prefix_caching"]),
        scheduling_policy="priority" if geometry["priority_policy"] else "fcfs",
        num_queue_pairs=int(geometry["num_queue_pairs"]),
        can_constrain=bool(geometry["vocab_bytes"]),
        task=Task(int(geometry["task"])),
        vector_width=int(geometry["vector_width"]),
        normalizes_vectors=bool(geometry["normalizes_vectors"]),
        speculates=is_speculating(geometry),
        num_adapters=int(geometry["num_adapters"]),
    )
