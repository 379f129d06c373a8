# SPDX-License-Identifier: Apache-2.0
"""The frontend's end of a queue pair, over a link that plays the scheduler's part word by word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import OverloadedError
from blink.link.queue_pair import QueuePair, Submission
from blink.region.layout import CQE, SQE, CqeKind, FinishReason, Opcode, RejectCode
from blink.region.native import lib
from blink.sampling_params import SamplingParams

TAGS = 3


class Places:
    """Where the parts of the only queue pair are."""

    sq_tail, cq_head, lease, attach, sq_head, attached, cq_tail = range(0, 28, 4)
    sq = 64
    cq = sq + 4 * SQE.itemsize
    arena = cq + 16 * CQE.itemsize


class Memory:
    """A link to plain memory that logs every access, and the scheduler's side of it."""

    addresses = Places()

    def __init__(self) -> None:
        config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=8, max_sequences_per_worker=TAGS)
        self.geometry = build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=16)
        self.geometry["sq_entries"], self.geometry["cq_entries"], self.geometry["arena_bytes"] = 4, 16, 4096
        self.bytes = np.zeros(Places.arena + 4096, np.uint8)
        self.writes: list[tuple[int, int]] = []
        self.posted = 0

    def write(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.writes.append((offset, len(data)))

    def store_word(self, offset: int, value: int) -> None:
        self.write(offset, np.uint32(value).tobytes())

    def load_word(self, offset: int) -> int:
        return int(self.bytes[offset : offset + 4].view(np.uint32)[0])

    def drain(self, head: int, out: int, most: int) -> int:
        return lib.blink_cq_drain(self.bytes[Places.cq :].ctypes.data, 16, head, out, most)

    def set_word(self, offset: int, value: int) -> None:
        self.bytes[offset : offset + 4].view(np.uint32)[0] = value

    def entry(self, position: int) -> Any:
        at = Places.sq + position % 4 * SQE.itemsize
        return self.bytes[at : at + SQE.itemsize].view(SQE)[0]

    def post(self, sequence: int, kind: CqeKind, finish: FinishReason = FinishReason.NONE, token: int = 0) -> None:
        at = Places.cq + self.posted % 16 * CQE.itemsize
        slot = self.bytes[at : at + CQE.itemsize].view(CQE)
        slot["sequence"], slot["token"] = sequence, token
        slot["tag"] = (self.posted // 16 + 1) & 1 | kind << 8 | finish << 16
        self.posted += 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def pair(memory: Memory) -> QueuePair:
    pair = QueuePair(memory)  # type: ignore[arg-type]
    pair.request_attach()
    memory.set_word(Places.attached, pair.generation)
    pair.start()
    memory.writes.clear()
    return pair


def prompt(length: int, hashes: bytes = b"", stops: tuple[int, ...] = ()) -> Submission:
    return Submission(np.arange(length, dtype=np.int32), stops, 5, hashes)


def consume(memory: Memory) -> None:
    memory.set_word(Places.sq_head, memory.load_word(Places.sq_tail))


def test_the_tail_is_written_after_the_entry_and_that_after_the_prompt(pair: QueuePair, memory: Memory) -> None:
    pair.submit(prompt(4), SamplingParams())
    offsets = [offset for offset, _ in memory.writes]
    assert offsets == [Places.arena, Places.sq, Places.sq_tail]
    assert memory.load_word(Places.sq_tail) == 1


def test_an_entry_says_where_in_the_arena_each_part_is(pair: QueuePair, memory: Memory) -> None:
    stops, biases, hashes = tuple(range(20, 32)), {7: -1.5, 9: 2.0}, bytes(range(32))
    params = SamplingParams(
        logit_bias=biases, best_effort=True, priority=-3, top_k=-1, logprobs=4, max_tokens=9, min_tokens=2
    )
    pair.submit(prompt(16, hashes, stops), params)
    entry = memory.entry(0)
    arena = memory.bytes[Places.arena :]

    def part(offset: str, size: int, dtype: str) -> list[Any]:
        start = int(entry[offset])
        return arena[start : start + size].view(dtype).tolist()

    assert entry["opcode"] == Opcode.SUBMIT and entry["service_class"] == 1 and entry["priority"] == -3
    assert part("prompt_offset", 64, "i4") == list(range(16)) and entry["num_prompt_tokens"] == 16
    assert bytes(part("hashes_offset", 32, "u1")) == hashes and entry["num_hashes"] == 2
    assert [*entry["stop_tokens"].tolist(), *part("more_stop_offset", 16, "i4")] == list(stops)
    assert part("bias_offset", 8, "i4") == [7, 9] and entry["num_biases"] == 2 and entry["num_stop_tokens"] == 12
    assert arena[int(entry["bias_offset"]) + 8 :][:8].view("f4").tolist() == [-1.5, 2.0]
    sampling = entry["sampling"]
    assert (sampling["top_k"], sampling["num_logprobs"], entry["max_tokens"], sampling["min_tokens"]) == (-1, 4, 9, 2)
    assert (sampling["seed_low"], sampling["seed_high"]) == (5, 0)


@pytest.mark.parametrize(("target_ms", "word"), [(None, 0), (0, 0xFFFFFFFF), (12.5, 12_500), (10_000, 10_000_000)])
def test_a_target_travels_in_microseconds(pair: QueuePair, memory: Memory, target_ms: float | None, word: int) -> None:
    pair.submit(prompt(4), SamplingParams(tpot_target_ms=target_ms))
    assert memory.entry(0)["tpot_target_us"] == word


@pytest.mark.parametrize("seed", [0, 2**32 + 7, 2**63 - 1, 2**64 - 1])
def test_all_bits_of_a_seed_travel(pair: QueuePair, memory: Memory, seed: int) -> None:
    pair.submit(Submission(np.zeros(4, np.int32), (), seed, b""), SamplingParams())
    sampling = memory.entry(0)["sampling"]
    assert int(sampling["seed_high"]) << 32 | int(sampling["seed_low"]) == seed


def test_ids_of_a_reused_tag_differ(pair: QueuePair, memory: Memory) -> None:
    ids = set[int]()
    for _ in range(5):
        sequence = pair.submit(prompt(4), SamplingParams())
        consume(memory)
        memory.post(sequence, CqeKind.ADMITTED)
        memory.post(sequence, CqeKind.TOKEN, FinishReason.STOP)
        pair.drain()
        ids.add(sequence)
    assert len(ids) == 5 and len({sequence & 0xFFFFFFFF for sequence in ids}) == 1


def test_prompt_memory_comes_back_with_the_admission_and_the_tag_with_the_end(pair: QueuePair, memory: Memory) -> None:
    sequence = pair.submit(prompt(50), SamplingParams())
    assert pair.arena_used_bytes > 0
    memory.post(sequence, CqeKind.ADMITTED)
    pair.drain()
    assert pair.arena_used_bytes == 0 and pair.num_live == 1
    memory.post(sequence, CqeKind.FINISHED, FinishReason.ABORT)
    pair.drain()
    assert pair.num_live == 0


def test_a_refused_submission_gives_everything_back(pair: QueuePair, memory: Memory) -> None:
    sequence = pair.submit(prompt(50), SamplingParams())
    memory.post(sequence, CqeKind.REJECTED, FinishReason.ERROR, RejectCode.DRAINING)
    (completion,) = pair.drain()
    assert completion["token"] == RejectCode.DRAINING and (pair.num_live, pair.arena_used_bytes) == (0, 0)


def test_completions_of_ended_sequences_are_hidden(pair: QueuePair, memory: Memory) -> None:
    first = pair.submit(prompt(4), SamplingParams())
    second = pair.submit(prompt(4), SamplingParams())
    memory.post(first, CqeKind.TOKEN, FinishReason.LENGTH)
    memory.post(first, CqeKind.REJECTED, FinishReason.ERROR, RejectCode.UNKNOWN_SEQUENCE)
    memory.post(second, CqeKind.TOKEN)
    assert [int(c["sequence"]) for c in pair.drain()] == [first, second]
    assert pair.num_live == 1 and memory.load_word(Places.cq_head) == 3


def test_no_more_sequences_than_tags_and_the_refusal_leaves_no_trace(pair: QueuePair, memory: Memory) -> None:
    for _ in range(TAGS):
        pair.submit(prompt(4), SamplingParams())
    before = memory.bytes.copy()
    with pytest.raises(OverloadedError, match="queue is full"):
        pair.submit(prompt(4), SamplingParams())
    assert (memory.bytes == before).all() and pair.num_live == TAGS


def test_a_full_arena_refuses_until_an_admission_frees_it(pair: QueuePair, memory: Memory) -> None:
    sequence = pair.submit(prompt(600), SamplingParams())
    with pytest.raises(OverloadedError, match="prompt memory"):
        pair.submit(prompt(600), SamplingParams())
    assert pair.num_live == 1
    memory.post(sequence, CqeKind.ADMITTED)
    pair.drain()
    pair.submit(prompt(600), SamplingParams())


def test_cancellations_that_find_the_queue_full_are_sent_later(pair: QueuePair, memory: Memory) -> None:
    sequences = [pair.submit(prompt(4), SamplingParams()) for _ in range(TAGS)]
    for sequence in sequences:
        pair.cancel(sequence)
    assert memory.load_word(Places.sq_tail) == 4  # three submissions and one cancellation fill the queue
    consume(memory)
    pair.flush_cancels()
    cancelled = {int(memory.entry(position)["sequence"]) for position in range(3, 6)}
    assert cancelled == set(sequences)
    assert {int(memory.entry(position)["opcode"]) for position in range(3, 6)} == {Opcode.CANCEL}


def test_unknown_and_ended_sequences_are_not_cancelled(pair: QueuePair, memory: Memory) -> None:
    sequence = pair.submit(prompt(4), SamplingParams())
    memory.post(sequence, CqeKind.TOKEN, FinishReason.STOP)
    pair.drain()
    again = pair.submit(prompt(4), SamplingParams())
    for unknown in (sequence, 77, again ^ 1 << 40):
        pair.cancel(unknown)
    assert memory.load_word(Places.sq_tail) == 2


def test_each_renewal_changes_the_lease_even_at_its_wrap(pair: QueuePair, memory: Memory) -> None:
    memory.set_word(Places.lease, 0xFFFFFFFE)
    pair.request_attach()
    assert memory.load_word(Places.lease) == 0xFFFFFFFF
    pair.renew_lease()
    assert memory.load_word(Places.lease) == 0


@pytest.mark.parametrize("last", [0, 5, 0xFFFFFFFF])
def test_a_new_owner_asks_under_a_generation_that_is_new_and_never_zero(
    memory: Memory, pair: QueuePair, last: int
) -> None:
    memory.set_word(Places.attach, last)
    memory.set_word(Places.attached, 0)
    pair.request_attach()
    assert memory.load_word(Places.attach) == pair.generation not in (0, last)
    assert not pair.is_attached()


def test_a_new_owner_starts_at_the_positions_that_the_scheduler_published(memory: Memory, pair: QueuePair) -> None:
    memory.set_word(Places.sq_head, 0xFFFFFFFE)
    memory.set_word(Places.cq_tail, 32)
    memory.posted = 32
    pair.start()
    assert memory.load_word(Places.sq_tail) == 0xFFFFFFFE and memory.load_word(Places.cq_head) == 32
    sequences = [pair.submit(prompt(4), SamplingParams()) for _ in range(TAGS)]
    assert memory.load_word(Places.sq_tail) == 1, "the tail wraps"
    memory.post(sequences[0], CqeKind.TOKEN)
    assert len(pair.drain()) == 1
