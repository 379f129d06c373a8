# SPDX-License-Identifier: Apache-2.0
"""One scheduler, stepped by hand at a clock of the test's, with a fake model; frontends use the real queue pairs."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.layout import BATCH_HEADER, DECISION_LOG_ENTRY, SEQUENCE, STEP_OUTPUT, StepResult
from blink.native import lib
from blink.queue_pair import QueuePair, Submission
from blink.region import QueuePairAddresses, Region, create_region, publish_region
from blink.sampling_params import SamplingParams
from blink.transport.shm import ShmTransport

_names = itertools.count()
MILLISECOND = 1_000_000


def next_token(tokens: np.ndarray[Any, Any], vocab_size: int) -> int:
    """The fake model: the next token depends on every token before it."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return int((tokens.astype(np.int64) * weights).sum() * 31 + len(tokens) * 7) % vocab_size


class Harness:
    """A stepped scheduler over a real region."""

    def __init__(self, config: EngineConfig, *, max_model_len: int, vocab_size: int, num_blocks: int) -> None:
        self.vocab_size = vocab_size
        name = f"test-{os.getpid()}-{next(_names)}"
        geometry = build_geometry(
            config, max_model_len=max_model_len, vocab_size=vocab_size, num_blocks=num_blocks, log_entries=1 << 16
        )
        self.region: Region = create_region(name, geometry, "test")
        publish_region(self.region, name)
        self.state = HostState(self.region)
        self.now = 1_000_000_000
        self.batch = self.state.array("batch", BATCH_HEADER)
        self.output = self.state.array("output", STEP_OUTPUT)
        self.sequences = self.state.array("sequences", SEQUENCE)
        self.tokens = self.state.array("tokens", "i4").reshape(-1, max_model_len)
        self.kv = np.full(num_blocks * config.block_size, -1, np.int64)  # the fake KV cache: a hash of the prefix
        self.block_size = config.block_size

    def close(self) -> None:
        self.region.path.unlink(missing_ok=True)
        self.region.close()

    def frontend(self, index: int) -> QueuePair:
        """Attach to a queue pair as a new owner (steps the scheduler until it agrees)."""
        pair = QueuePair(ShmTransport(self.region), QueuePairAddresses(self.region, index), self.region.geometry)
        pair.request_attach()
        for _ in range(100):
            self.step()
            if pair.is_attached():
                pair.start()
                return pair
        raise AssertionError("the scheduler does not attach the frontend")

    def step(self, milliseconds: float = 1.0) -> StepResult:
        """Run one pass; a launched step is computed at once, so that the next pass retires it."""
        self.now += int(milliseconds * MILLISECOND)
        result = StepResult(lib.blink_step(self.state.address, self.now))
        broken = lib.blink_check_integrity(self.state.address)
        assert broken is None, broken.decode()
        if result == StepResult.LAUNCHED:
            self.compute()
        return result

    def compute(self) -> None:
        """Play the model: write the KV of each token where told, and sample from what the block table holds."""
        batch = self.batch[0]
        rows = int(batch["num_rows"])
        starts = self.state.array("query_starts", "i4")
        slots = self.state.array("row_slots", "i4")
        lens = self.state.array("context_lens", "i4")
        ids, positions = self.state.array("input_ids", "i4"), self.state.array("positions", "i4")
        kv_slots = self.state.array("kv_slots", "i4")
        tables = self.state.array("block_tables", "i4").reshape(len(self.tokens), -1)
        sampled = self.state.array("sampled_tokens", "i4")
        for token in range(int(batch["num_tokens"])):
            self.kv[kv_slots[token]] = int(positions[token]) << 32 | int(ids[token])
        for row in range(rows):
            assert starts[row] < starts[row + 1]
            table = tables[slots[row]]
            at = np.arange(lens[row])
            cells = self.kv[table[at // self.block_size] * self.block_size + at % self.block_size]
            assert (cells >> 32 == at).all(), "the KV cache holds another position"
            sampled[row] = next_token(cells & 0xFFFFFFFF, self.vocab_size)
        self.output[0]["done_step"] = batch["step"]

    def decision_log(self, count: int) -> np.ndarray[Any, Any]:
        return self.state.array("log", DECISION_LOG_ENTRY)[:count]


def submission(prompt: list[int], stop_tokens: tuple[int, ...] = (), hashes: bytes = b"") -> Submission:
    return Submission(np.asarray(prompt, np.int32), stop_tokens, 0, hashes)


def expected_tokens(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What the fake model generates from a prompt, computed without any scheduler."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.asarray(tokens), vocab_size))
    return tokens[len(prompt) :]


__all__ = ["Harness", "SamplingParams", "expected_tokens", "next_token", "submission"]
