# SPDX-License-Identifier: Apache-2.0
"""One scheduler, stepped by hand at a clock of the test's, with a fake model; frontends use the real queue pairs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from blink.bits import power_of_two
from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.link.queue_pair import NO_HASH_ROOT, KvOrigin, QueuePair, Submission
from blink.link.shm import ShmLink
from blink.models.cache_layout import CONV_WIDTH
from blink.region.layout import (
    BATCH_HEADER,
    CONSTANTS,
    DECISION_LOG_ENTRY,
    GRAPH_COST,
    ROW,
    SEQUENCE,
    STEP_OUTPUT,
    CqeKind,
    EngineState,
    ErrorCode,
    FinishReason,
    RowKind,
    StepKind,
    StepResult,
    struct_dtype,
)
from blink.region.memory import Region, create_region, publish_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.text.prompt import hash_blocks, hash_root

_names = itertools.count()
MILLISECOND = 1_000_000
Completion = Any  # one row of dtype layout.COMPLETION
Step = Callable[[int, int], int]  # (address of the state, time in ns): one pass


def next_token(tokens: np.ndarray[Any, Any], vocab_size: int) -> int:
    """The fake model: the next token depends on every token before it."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return int((tokens.astype(np.int64) * weights).sum() * 31 + len(tokens) * 7) % vocab_size


class Harness:
    """A stepped scheduler over a real region; `overrides` replace fields of the geometry."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        num_blocks: int,
        step: Step = lib.blink_step,
        **overrides: int,
    ) -> None:
        self.vocab_size = vocab_size
        name = f"test-{os.getpid()}-{next(_names)}"
        geometry = build_geometry(
            config,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            log_entries=1 << 14,
            others={"patient_steps": overrides.get("patient_steps", 0)},
        )
        for field, value in overrides.items():
            geometry[field] = value
        self.geometry: Any = geometry
        self.region: Region = create_region(name, geometry, "test")
        publish_region(self.region, name)
        self.state = HostState(self.region)
        self._step = step
        self.now = 1_000_000_000
        self.scheduler: Any = self.state.struct
        self.copy_order = self.state.array("copy_order", struct_dtype("CopyOrder"))
        self.queue_pairs = self.state.array("qps", struct_dtype("QueuePairState"))
        self.flows = self.state.array("flows", struct_dtype("Flow"))
        self.sequences = self.state.array("sequences", SEQUENCE)
        self.tokens = self.state.array("tokens", "i4").reshape(-1, max_model_len)
        self.kv = np.full(num_blocks * config.block_size, -1, np.int64)  # position and token of each cell
        self.histories = np.zeros_like(self.kv)  # digest of all tokens up to each cell's
        self.window_histories = np.full(int(geometry["num_window_blocks"]) * config.block_size, -1, np.int64)
        # Tokens, and their digest, in the recurrent states of each slot; and in each snapshot.
        self.states = np.full((int(geometry["num_slots"]), 2), -1, np.int64)
        self.snapshots = np.full((int(geometry["num_snapshots"]), 2), -1, np.int64)
        # Digests up to each slot's last tokens, by their positions: what convolutions read, and states take in later.
        ring = CONV_WIDTH + 2 * int(geometry["spec_tokens"])
        self.inputs, self.snapshot_inputs = (np.full((len(kept), ring), -1) for kept in (self.states, self.snapshots))
        self.host_histories = np.full((int(geometry["num_host_blocks"]), 2, config.block_size), -1, np.int64)
        self.block_size = config.block_size
        self.in_flight = False
        self.log_count = 0
        self.num_launches = self.num_retired = 0

    @property
    def kind(self) -> StepKind:
        """Whose buffers the newest launch has."""
        return StepKind(int(self.scheduler["in_flight_kind"]))

    @property
    def is_segment(self) -> bool:
        """Whether the newest launch is a segment of a step."""
        return self.kind == StepKind.SEGMENTED

    def step_array(self, name: str, dtype: np.dtype[Any] | type[Any] | str) -> np.ndarray[Any, Any]:
        """Return an array of the step that was launched last."""
        return self.state.array(self.kind.array(name), dtype)

    @property
    def batch(self) -> np.ndarray[Any, Any]:
        return self.step_array("header", BATCH_HEADER)

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """The rows of the step that was launched last."""
        return self.step_array("rows", ROW)[: int(self.batch[0]["num_rows"])]

    @property
    def costs(self) -> np.ndarray[Any, Any]:
        """The cost table, all zero where no test fills it."""
        return self.state.array("costs", GRAPH_COST)

    def close(self) -> None:
        self.region.path.unlink(missing_ok=True)
        self.region.close()

    def frontend(self, index: int = 0) -> QueuePair:
        """Attach to a queue pair as a new owner (steps the scheduler until it agrees)."""
        pair = self.attach_later(index)
        for _ in range(100):
            self.step()
            if pair.is_attached():
                pair.start()
                return pair
        raise AssertionError("the scheduler does not attach the frontend")

    def attach_later(self, index: int) -> QueuePair:
        """Ask for a queue pair as a new owner, without a step."""
        pair = QueuePair(ShmLink(self.region, index))
        pair.request_attach()
        return pair

    def step(self, milliseconds: float = 1.0, *, finish: bool = True, copy: bool = True) -> StepResult:
        """Run one pass. What it launches is over before the next one, unless `finish` (of steps) or `copy` say not."""
        self.now += int(milliseconds * MILLISECOND)
        result = StepResult(self._step(self.state.address, self.now))
        if result != StepResult.BUSY:
            self.num_retired = self.num_launches
        broken = lib.blink_check_integrity(self.state.address)
        assert broken is None, broken.decode()
        if result == StepResult.LAUNCHED:
            self.in_flight = True
            self.num_launches += 1
            self._copy_blocks()
            segment, num_segments = int(self.batch[0]["segment"]), int(self.scheduler["num_segments"])
            self.log_count += int(self.batch[0]["num_rows"]) * (segment == 0)
            if segment == 0:
                self._load_snapshots()
            if not self.is_segment or segment + 1 == num_segments:
                self.compute()  # of a step in segments not before the last: whoever relies on more is found out
        if finish and self.in_flight:
            self.finish()
        if copy:
            self.copy_order["done"] = self.copy_order["ordered"]
        return result

    def finish(self, failed: int = 0) -> None:
        """Let the step in flight be over; failed: as StepOutput has it."""
        self.in_flight = False
        output = self.step_array("output", STEP_OUTPUT)
        output[0]["failed"] = failed
        output[0]["done_step"] = self.batch[0]["step"]

    def compute(self) -> None:
        """Play the model: write the KV of each token where told, and sample from what the block table holds."""
        batch = self.batch[0]
        rows, tokens = int(batch["num_rows"]), int(batch["num_tokens"])
        starts, slots, lens = (self.step_array(name, "i4") for name in ("query_starts", "row_slots", "context_lens"))
        ids, positions, kv_slots = (
            self.step_array(name, "i4")[:tokens] for name in ("input_ids", "positions", "kv_slots")
        )
        assert len(set(kv_slots.tolist())) == tokens, "two tokens write the same KV"
        tables = self.state.array("block_tables", "i4").reshape(len(self.tokens), -1)
        sampled = self.step_array("sampled_tokens", "i4")
        self._check_padding(rows, tokens)
        self._targets = dict[int, int]()  # slots by the snapshots that are made of them behind the last layer
        self.kv[kv_slots] = positions.astype(np.int64) << 32 | ids
        for row in range(rows):
            assert starts[row] < starts[row + 1]
            at = np.arange(lens[row])
            where = tables[slots[row]][at // self.block_size] * self.block_size + at % self.block_size
            cells = self.kv[where]
            assert (cells >> 32 == at).all(), "the KV cache holds another position"
            history = np.cumsum((cells & 0xFFFFFFFF) * (at + 1) * 1_000_003)
            new = starts[row + 1] - starts[row]
            if len(self.window_histories):
                self._attend_in_window(int(starts[row]), int(slots[row]), history, new)
            self.histories[where[-new:]] = history[-new:]
            assert (self.histories[where] == history).all(), "the KV cache holds another prompt's"
            sampled[row] = next_token(cells & 0xFFFFFFFF, self.vocab_size)
            if len(self.snapshots) > 0:
                self._advance_state(row, slots[row], history, new)
        for target, slot in self._targets.items():
            self.snapshots[target - 1], self.snapshot_inputs[target - 1] = self.states[slot], self.inputs[slot]
        self._write_logprobs(rows)
        self._write_prompt_logprobs(ids, positions)
        if self.geometry["vector_width"]:
            self._write_vectors(rows)
        if len(self.window_histories):  # no later step may read what is free by now
            free = self.state.array("free_window_blocks", "u4")[: int(self.scheduler["num_free_window_blocks"])]
            self.window_histories.reshape(-1, self.block_size)[free] = -1

    def _copy_blocks(self) -> None:
        """Make the copies that a launch begins with, between the KV cache and the host's blocks."""
        copies, size = self.state.array("host.copies", struct_dtype("HostCopy")), self.block_size
        for at in range(*self.state.array("host.copy_bounds", "u4").tolist()):
            block, host_block, to_host = copies[at % len(copies)].tolist()
            cells, kept = slice(block * size, (block + 1) * size), self.host_histories[host_block]
            if to_host:
                kept[:] = self.kv[cells], self.histories[cells]
            else:
                assert (kept >= 0).all(), "a host block is restored that was never written"
                self.kv[cells], self.histories[cells] = kept

    def _load_snapshots(self) -> None:
        """Let the rows of a step begin with the snapshots that they are to begin with."""
        rows = int(self.batch[0]["num_rows"])
        sources, slots = (self.step_array(name, "i4")[:rows] for name in ("state_sources", "row_slots"))
        for row in sources.nonzero()[0]:
            self.states[slots[row]] = self.snapshots[sources[row] - 1]
            self.inputs[slots[row]] = self.snapshot_inputs[sources[row] - 1]

    def _advance_state(self, row: int, slot: int, history: np.ndarray[Any, Any], new: int) -> None:
        """See that a row's states are those of tokens before it, and move them on; history: digests of each.

        States do not take in drafts. Those that were accepted follow with the next row that is sure.
        """
        start, inputs = len(history) - new, self.inputs[slot]
        lag = int(self.step_array("state_lags", "i4")[row])
        is_draft = self.rows["kind"][row] == RowKind.NONE
        assert lag < start or lag == 0, "more tokens are to be taken in than there were"
        known = start - lag if not is_draft else int(self.states[slot, 0])
        if known > 0:
            assert self.states[slot].tolist() == [known, history[known - 1]], "the states are of another prefix"
        read = np.arange(max(known + 1 - CONV_WIDTH, 0), start)
        assert (inputs[read % len(inputs)] == history[read]).all(), "inputs of another text are read"
        at = np.arange(max(start, len(history) - len(inputs)), len(history))
        inputs[at % len(inputs)] = history[at]
        if not is_draft:
            self.states[slot] = len(history), history[-1]
        if target := self.step_array("state_targets", "i4")[row]:
            assert not is_draft, "a snapshot is made of what a draft may be taken back from"
            self._targets[int(target)] = slot

    def _attend_in_window(self, first: int, slot: int, history: np.ndarray[Any, Any], new: int) -> None:
        """Write a row's tokens to window blocks, and see that those hold all that its queries see.

        first: the row's first token in the batch; history: digests up to each token of the sequence.
        """
        written = self.step_array("window_kv_slots", "i4")[first : first + new]
        self.window_histories[written] = history[-new:]
        at = np.arange(max(len(history) - new - int(self.geometry["window"]) + 1, 0), len(history))
        table = self.state.array("window_tables", "i4").reshape(len(self.tokens), -1)[slot]
        where = table[at // self.block_size] * self.block_size + at % self.block_size
        assert (where[-new:] == written).all(), "a token is not written where its table says"
        assert (self.window_histories[where] == history[at]).all(), "a window block holds another's tokens"

    def _check_padding(self, rows: int, tokens: int) -> None:
        """See that what fills the graph's size up is harmless: tokens that write no KV, rows without any."""
        size = self.geometry["graphs"][int(self.batch[0]["graph"])]
        all_tokens, all_rows = int(size["tokens"]), int(size["rows"])
        for name in ("kv_slots", "window_kv_slots"):
            assert (self.step_array(name, "i4")[tokens:all_tokens] == -1).all(), "padding writes KV"
        for name in ("input_ids", "positions"):
            assert not self.step_array(name, "i4")[tokens:all_tokens].any(), f"padding has {name}"
        for name in ("context_lens", "row_slots", "state_sources", "state_targets", "state_lags"):
            assert not self.step_array(name, "i4")[rows:all_rows].any(), f"padding has {name}"
        assert (self.step_array("query_starts", "i4")[rows : all_rows + 1] == tokens).all(), "padding has tokens"

    def _write_logprobs(self, rows: int) -> None:
        sampled = self.step_array("sampled_tokens", "i4")[:rows]
        ranks = np.arange(CONSTANTS["max_logprobs"])
        tops = self.step_array("top_tokens", "i4").reshape(-1, len(ranks))
        tops[:rows] = (sampled[:, None] + ranks) % self.vocab_size
        self.step_array("top_logprobs", "f4").reshape(-1, len(ranks))[:rows] = -ranks
        self.step_array("sampled_logprobs", "f4")[:rows] = -sampled / 8

    def _write_prompt_logprobs(self, ids: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> None:
        """Make each token's logprob of its place and its content; graphs without prompt logprobs leave NaN."""
        tokens, ranks = len(ids), np.arange(CONSTANTS["max_logprobs"])
        is_scoring = self.batch[0]["graph"] >= self.geometry["first_scoring_graph"]
        self.step_array("prompt_logprobs", "f4")[:tokens] = -positions - ids / 128 if is_scoring else np.nan
        tops = self.step_array("prompt_top_tokens", "i4").reshape(-1, len(ranks))
        tops[:tokens] = (ids[:, None] + ranks) % self.vocab_size
        self.step_array("prompt_top_logprobs", "f4").reshape(-1, len(ranks))[:tokens] = -ranks

    def _write_vectors(self, rows: int) -> None:
        """Make each row's vector of the token that would follow its tokens so far, and leave what fills it up."""
        width = int(self.geometry["vector_width"])
        vectors = self.step_array("vectors", "f4").reshape(int(self.geometry["max_num_seqs"]), -1)
        vectors[:rows, :width] = self.step_array("sampled_tokens", "i4")[:rows, None] + np.arange(width) / 8

    def decision_log(self) -> np.ndarray[Any, Any]:
        """Return every scheduled row since the start."""
        log = self.state.array("log", DECISION_LOG_ENTRY)
        assert self.log_count <= len(log)
        return log[: self.log_count]

    def batch_rows(self) -> list[tuple[int, int]]:
        """Return (sequence index, tokens) of each row of the last batch."""
        return self.rows[["sequence", "num_tokens"]].tolist()

    @property
    def engine_state(self) -> EngineState:
        return EngineState(self.region.control_word("state"))

    @property
    def error_code(self) -> ErrorCode:
        return ErrorCode(self.region.control_word("error_code"))

    def statistic(self, name: str) -> int:
        return int(self.region.control["statistics"][name])

    def hashes(self, prompt: Sequence[int], salt: bytes = b"") -> bytes:
        """Return the block hashes of a prompt as a frontend computes them."""
        key = self.region.header["hash_key"].tobytes()
        return hash_blocks(np.asarray(prompt, np.int32), self.block_size, key, self.hash_root(salt))

    def hash_root(self, salt: bytes = b"") -> bytes:
        """Return what these hashes begin with, for sequences whose answer is to be cached too."""
        return hash_root(self.region.header["hash_key"].tobytes(), salt)


def with_windows(window: int, num_window_blocks: int) -> dict[str, int]:
    """Return the sizes of a model some of whose layers see `window` tokens, in so many window blocks."""
    entries = power_of_two(4 * num_window_blocks)
    return {"window": window, "num_window_blocks": num_window_blocks, "window_lru_entries": entries}


def with_host(num_host_blocks: int, host_copies: int = 256) -> dict[str, int]:
    """Return the sizes of a KV cache with so many blocks in host memory."""
    entries = power_of_two(2 * num_host_blocks)
    return {"num_host_blocks": num_host_blocks, "host_hash_entries": entries, "host_copies": host_copies}


@contextmanager
def running(config: EngineConfig, **sizes: Any) -> Iterator[Harness]:
    """A harness that cleans up after itself; by default 64 tokens per sequence and room for eight such."""
    defaults: dict[str, Any] = {"max_model_len": 64, "vocab_size": 97, "num_blocks": 8 * 64 // config.block_size}
    harness = Harness(config, **(defaults | sizes))
    try:
        yield harness
    finally:
        harness.close()


def small_config(**options: Any) -> EngineConfig:
    """Return a configuration small enough that its limits are met within a few steps."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_queue_pairs": 2,
        "max_sequences_per_worker": 8,
    }
    return EngineConfig(**(defaults | options))


def submission(
    prompt: Sequence[int],
    stop_tokens: tuple[int, ...] = (),
    hashes: bytes = b"",
    flow: int = 0,
    root: bytes = NO_HASH_ROOT,
) -> Submission:
    return Submission(np.asarray(prompt, np.int32), stop_tokens, 0, hashes, flow, KvOrigin(root))


def submit(
    harness: Harness,
    pair: QueuePair,
    prompt: Sequence[int],
    *,
    stop_tokens: tuple[int, ...] = (),
    cached: bool = True,
    flow: int = 0,
    **params: Any,
) -> int:
    """Submit a prompt with its block hashes (unless not `cached`) and return the sequence's id."""
    hashes = harness.hashes(prompt) if cached else b""
    return pair.submit(submission(prompt, stop_tokens, hashes, flow), SamplingParams(**params))


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What the fake model generates from a prompt, computed without any scheduler."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.asarray(tokens), vocab_size))
    return tokens[len(prompt) :]


class Inbox:
    """What has arrived for each sequence of some frontends."""

    def __init__(self) -> None:
        self.completions: dict[int, list[Completion]] = {}

    def drain(self, *pairs: QueuePair) -> None:
        """Renew the leases and take what has arrived."""
        for pair in pairs:
            pair.renew_lease()
            for completion in pair.drain().copy():
                self.completions.setdefault(int(completion["sequence"]), []).append(completion)

    def of_kind(self, sequence: int, kind: CqeKind) -> list[Completion]:
        return [c for c in self.completions.get(sequence, []) if c["kind"] == kind]

    def tokens(self, sequence: int) -> list[int]:
        return [int(c["token"]) for c in self.of_kind(sequence, CqeKind.TOKEN)]

    def cached(self, sequence: int) -> int | None:
        """Return the prompt tokens found in the cache; None before admission."""
        admitted = self.of_kind(sequence, CqeKind.ADMITTED)
        return int(admitted[0]["token"]) if admitted else None

    def finish(self, sequence: int) -> FinishReason | None:
        reasons = [FinishReason(int(c["finish_reason"])) for c in self.completions.get(sequence, [])]
        ends = [reason for reason in reasons if reason != FinishReason.NONE]
        assert len(ends) <= 1, "a sequence ended twice"
        return ends[0] if ends else None


def run_until_finished(
    harness: Harness, inbox: Inbox, pairs: Iterable[QueuePair], sequences: Iterable[int], limit: int = 500
) -> int:
    """Step until all `sequences` have ended and return the number of steps."""
    pairs, sequences = list(pairs), list(sequences)
    for steps in range(limit):
        inbox.drain(*pairs)
        if all(inbox.finish(sequence) is not None for sequence in sequences):
            return steps
        harness.step()
    raise AssertionError(f"not all sequences ended within {limit} steps")
