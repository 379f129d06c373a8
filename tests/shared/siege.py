# SPDX-License-Identifier: Apache-2.0
"""A scheduler of the CPU or of a GPU that takes millions of hostile entries, beside an honest frontend.

The honest one's tokens, and the memory that is its own, must come out as if it were alone.
"""

from __future__ import annotations

import os
import secrets
from typing import Any, Protocol

import numpy as np

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.link.queue_pair import QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import CqeKind, EngineState, FinishReason
from blink.region.memory import QueuePairAddresses, Region, create_region
from blink.sampling_params import SamplingParams
from hostile_frontend import HostileFrontend

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256
VOCAB_BYTES = 4 * VOCAB_SIZE
MAX_SEQS = 12
_HOSTILE_PAIRS = 6
_BLOCKS = 200
_STALL_SECONDS = 0.5
_HONEST = 8  # requests at a time
_MOST_ROUNDS = 2000  # until all of the hostile requests have ended


def next_token(total: Any, length: Any) -> Any:
    """The fake model: the next token depends on the sum of those before it, each weighed by its place."""
    return (total * 31 + length * 7 + 1) % VOCAB_SIZE


def place_weights(length: int) -> Any:
    return np.arange(1, length + 1, dtype=np.int64) % 97


class Machine(Protocol):
    """A scheduler with the fake model, over a region that the test maps."""

    region: Region

    def advance(self) -> None:
        """Run a hundred passes or more, and the steps that they launch."""
        ...

    def check(self) -> None:
        """Compare the scheduler's state with its invariants, where that can be done."""
        ...


def make_region(num_hostile: int = _HOSTILE_PAIRS) -> Region:
    config = EngineConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=128,
        num_queue_pairs=1 + num_hostile,
        max_sequences_per_worker=2048,
        lease_timeout=3600,
        stall_timeout=_STALL_SECONDS,
        prompt_arena_bytes=1 << 16,
    )
    geometry = build_geometry(
        config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, num_blocks=_BLOCKS, vocab_bytes=VOCAB_BYTES
    )
    return create_region(f"siege-{os.getpid()}-{secrets.token_hex(3)}", geometry, "fake")


class _Honest:
    """The frontend whose answers count: some requests at a time, each token compared."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._at = QueuePairAddresses(region, 0)
        self._pair = QueuePair(ShmLink(region, 0))
        self._chance = np.random.default_rng(5)
        self._expected: dict[int, list[int]] = {}
        self.answered = 0
        self._pair.request_attach()

    def start(self) -> None:
        assert self._pair.is_attached(), "the honest frontend was not attached"
        self._pair.start()

    def act(self) -> None:
        assert self._pair.is_attached(), "the honest frontend lost its queue pair"
        self._pair.renew_lease()
        for completion in self._pair.drain().tolist():
            self._judge(*completion[:3], *completion[5:])
        while len(self._expected) < _HONEST:
            self._submit()

    def shadow(self) -> bytes:
        """What of its queue pair only it writes: prompts and entries."""
        size, start = int(self._region.geometry["arena_bytes"]), self._at.arena
        return (
            self._region.bytes[self._at.sq : self._at.cq].tobytes() + self._region.bytes[start : start + size].tobytes()
        )

    def _submit(self) -> None:
        length, count = int(self._chance.integers(1, 80)), int(self._chance.integers(1, 12))
        tokens = self._chance.integers(0, VOCAB_SIZE, length).tolist()
        prompt = np.array(tokens, np.int32)
        for _ in range(count):
            total = int((np.array(tokens, np.int64) * place_weights(len(tokens))).sum())
            tokens.append(int(next_token(total, len(tokens))))
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self._expected[self._pair.submit(Submission(prompt, (), 0, b""), params)] = tokens[length:]

    def _judge(self, sequence: int, _: int, token: int, __: Any, kind: int, reason: int, ___: int) -> None:
        left = self._expected[sequence]
        if kind == CqeKind.ADMITTED:
            return
        assert kind == CqeKind.TOKEN and token == left.pop(0), "a wrong answer"
        if reason:
            assert not left and reason == FinishReason.LENGTH
            del self._expected[sequence]
            self.answered += 1


def besiege(machine: Machine, num_entries: int) -> dict[str, int]:
    """Send that many hostile entries, half of them through sound words; return what became of them."""
    region = machine.region
    num_pairs = int(region.geometry["num_queue_pairs"])
    honest = _Honest(region)
    hostile = [HostileFrontend(region, index, index) for index in range(1, num_pairs)]
    for each in hostile:
        each.attach()
    machine.advance()
    honest.start()

    def turn(*, sends: bool, wild: bool) -> None:
        honest.act()
        for each in hostile:
            each.act(wild=wild) if sends else each.drain()
            each.renew()
        before = honest.shadow()
        machine.advance()
        assert region.control_word("state") == EngineState.READY, "the engine stopped"
        assert honest.shadow() == before, "the honest frontend's memory changed"
        machine.check()

    def sent() -> int:
        return sum(each.sent - each.num_untaken for each in hostile)

    while sent() < num_entries // 2:
        turn(sends=True, wild=False)
    for _ in range(_MOST_ROUNDS):
        turn(sends=False, wild=False)
        if not any(each.num_untaken for each in hostile):
            break
    turn(sends=False, wild=False)
    for each in hostile:
        assert each.is_attached and each.num_untaken == 0 and each.refused == each.bad, "a bad entry was not refused"
    taken = sent()
    while sent() < max(num_entries, taken + 1):
        turn(sends=True, wild=True)
    before = honest.answered
    for _ in range(20):
        turn(sends=False, wild=False)
    assert honest.answered > before, "the honest frontend starves"
    return {"sent": sent(), "answered": honest.answered, **_count(region, hostile)}


def _count(region: Region, hostile: list[HostileFrontend]) -> dict[str, int]:
    counts = {name: sum(getattr(each, name) for each in hostile) for name in ("bad", "started", "losses")}
    statistics = region.control["statistics"]
    counts["automata"] = int(statistics["automata_loaded"])
    return {**counts, "rejected": int(statistics["num_rejected"]), "steps": int(statistics["num_steps"])}
