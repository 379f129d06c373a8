# SPDX-License-Identifier: Apache-2.0
"""Random frontends and a random engine: a load that is the same in every run, and the trace of what the scheduler did.

The trace holds of each pass its result, of each launch the batch as the model reads it, the decision log and the
accounts, and every completion as its frontend reads it. It does not say how the scheduler stores any of them.

python tests/native/random_load.py FILE records the digests of a long trace.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from blink.errors import OverloadedError
from blink.link.queue_pair import NO_HASH_ROOT, KvOrigin, QueuePair, Submission
from blink.region.layout import (
    CONSTANTS,
    DECISION_LOG_ENTRY,
    SLOT_PARAMS,
    CqeKind,
    FinishReason,
    Opcode,
    StepClass,
    StepResult,
)
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from harness import MILLISECOND, Harness, Step, running, small_config
from many_automata import MANY

VOCAB, MAX_MODEL_LEN = 97, 64
STEPS_OF_EPISODE, EPISODES_OF_BLOCK = 250, 4
FIRST_SEED = 12  # from here all kinds of decision are taken within two blocks
LEASE_MS, AGE_MS = 500, 60
_EVENTS = ("num_parked", "num_preemptions", "evicted_blocks", "prefix_hits", "num_rejected", "expired_leases")
_EVENTS += ("host_hits", "host_blocks_stored")
_EVENTS += ("num_drafts", "draft_tokens", "accepted_tokens")
_EVENTS += ("finished_stop", "finished_length", "finished_abort", "finished_error", "automata_loaded", "prefix_resets")
_BATCH = ("num_rows", "num_tokens", "num_decode_rows", "graph", "step", "segment")
_LOG = ("step", "row", "sequence", "slot", "num_computed", "num_tokens", "last_block", "graph")
_COUNTS = ("num_running", "num_waiting", "num_free_blocks", "num_evictable", "num_free_slots", "num_fast_steps")
_COUNTS += ("best_effort_credit_ns", "preemption_credit_ns", "flow_floor", "pass", "num_segments")
_TRACE = ("step", "retired_ns", "launched_ns", "graph", "num_rows", "num_tokens", "num_decode_rows", "num_running")
_TRACE += ("num_waiting", "num_free_blocks", "num_admitted", "num_preempted", "idle_before", "num_best_effort_rows")
_TRACE += ("step_class", "segment", "num_segments", "predicted_ns")
_COMPLETION = ("sequence", "kind", "finish_reason", "rank", "token", "index", "time_ns")


class Frontend:
    """One owner of a queue pair, who may be slow, or gone."""

    def __init__(self, pair: QueuePair, is_attached: bool) -> None:
        self.pair = pair
        self.is_attached = is_attached
        self.is_alive = True
        self.live: list[int] = []


class Episode:
    """One engine of random size, and those who use it."""

    def __init__(self, harness: Harness, script: random.Random, segments: int, num_pairs: int) -> None:
        self.h, self.script, self.segments = harness, script, segments
        self.counts: Counter[str] = Counter()
        self.known: list[list[int]] = [[]]  # prompts, and what was generated from them
        self.texts: dict[tuple[int, int], list[int]] = {}  # by queue pair and sequence
        harness.region.header["hash_key"] = np.arange(16, dtype=np.uint8)  # evictions must not hang on it
        for graph in range(int(harness.geometry["num_graphs"]) if segments else 0):
            harness.costs[graph] = (MILLISECOND // 2 * (2 + graph), 1000, segments)
        self.frontends = [Frontend(harness.frontend(i), True) for i in range(num_pairs)]
        self.is_calm = script.random() < 0.4  # long texts, few arrivals and no logprobs: rows may take the fast path
        self.arrivals = self.reading = 0.0

    def run(self) -> Iterator[bytes]:
        """Yield what the trace has of each pass."""
        for number in range(STEPS_OF_EPISODE):
            if number % 25 == 0:
                self.arrivals = self.script.choice((0.03, 0.1) if self.is_calm else (0.05, 0.2, 0.5))
                self.reading = self.script.choice((1.0, 1.0, 0.7, 0.05))
            yield b"".join(self._live())
            yield self._step()
        for name in _EVENTS:
            self.counts[name] += self.h.statistic(name)
        self.counts["num_fast_steps"] += int(self.h.scheduler["num_fast_steps"])

    def _live(self) -> Iterator[bytes]:
        """Let the frontends do what they do between two passes."""
        script = self.script
        for index, frontend in enumerate(self.frontends):
            if script.random() < 0.004:
                frontend.is_alive = False
            if script.random() < 0.05 and not frontend.is_alive:
                self.frontends[index] = frontend = Frontend(self.h.attach_later(index), False)
            if not frontend.is_attached and frontend.pair.is_attached():
                frontend.pair.start()
                frontend.is_attached = True
            if not (frontend.is_alive and frontend.is_attached):
                continue
            frontend.pair.renew_lease()
            while script.random() < self.arrivals:
                with suppress(OverloadedError):
                    self._submit(index, frontend)
            if frontend.live and script.random() < 0.03:
                frontend.pair.cancel(script.choice(frontend.live[-8:]))
            if script.random() < 0.005 and frontend.pair._sq_room():
                frontend.pair.order(Opcode.RESET_PREFIX_CACHE)
            if script.random() < self.reading:
                yield self._read(index, frontend)
            frontend.pair._free_tags.sort()  # completions of one step come in any order

    def _submit(self, index: int, frontend: Frontend) -> None:
        script, chance = self.script, self.script.random()
        family, shared = script.randrange(3), script.randrange(50)
        before = script.choice(self.known) if chance < 0.2 else [(family * 11 + i) % VOCAB for i in range(shared)]
        prompt = [*before, *(script.randrange(VOCAB) for _ in range(script.randint(1, 4)))][: MAX_MODEL_LEN - 1]
        if script.random() < 0.02:
            prompt[-1] = VOCAB  # to be rejected
        max_tokens = 60 if self.is_calm else script.choice((1, script.randint(1, 14), script.randint(1, 14), 60))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(script.choice((0, 0, 3)), max_tokens),
            logprobs=None if self.is_calm else script.choice((None, 0, 2)),
            prompt_logprobs=None if self.is_calm else script.choice((None, None, None, 0, 2)),
            best_effort=script.random() < 0.4,
            priority=script.randint(-1, 1),
        )
        automaton = MANY[script.randrange(6)] if script.random() < 0.1 else None
        root = self.h.hash_root() if script.random() < 0.5 else NO_HASH_ROOT
        stops = tuple(script.sample(range(VOCAB), script.choice((0, 1, 6, 8, 20))))
        flow, hashes = script.choice((0, 1, 257)), self.h.hashes(prompt)
        entry = Submission(np.asarray(prompt, np.int32), stops, 0, hashes, flow, KvOrigin(root), automaton)
        sequence = frontend.pair.submit(entry, params)
        frontend.live.append(sequence)
        self.texts[index, sequence] = prompt

    def _read(self, index: int, frontend: Frontend) -> bytes:
        """Take what has arrived, in the order of sequences."""
        found = frontend.pair.drain().copy()
        found = found[np.argsort(found["sequence"], kind="stable")]
        for sequence, kind, finish, token in found[["sequence", "kind", "finish_reason", "token"]].tolist():
            text = self.texts.get((index, sequence))
            if text is not None and kind == CqeKind.TOKEN:
                text.append(token)
            if finish != FinishReason.NONE and sequence in frontend.live:
                frontend.live.remove(sequence)
                self.known = [*self.known[-9:], text or []]
        logprobs = np.nan_to_num(found["logprob"].astype("<f4"), nan=1.0)
        return pack(index, *(found[name] for name in _COMPLETION)) + logprobs.tobytes()

    def _step(self) -> bytes:
        script, h = self.script, self.h
        predicted_ms = int(h.scheduler["account"]["predicted_ns"]) / MILLISECOND if self.segments else 1.0
        is_late = script.random() < (0.004 if all(frontend.is_alive for frontend in self.frontends) else 0.2)
        pause = LEASE_MS if is_late else 0  # of which the scheduler counts a half
        result = h.step(predicted_ms * script.choice((0.5, 1, 1, 1.25)) + pause, finish=script.random() < 0.9)
        self.counts[result.name] += 1
        state = h.scheduler
        traced = pack(int(result), *(int(state[name]) for name in _COUNTS))
        return traced + self._trace_launch() if result == StepResult.LAUNCHED else traced

    def _trace_launch(self) -> bytes:
        """Return what was launched, after some of what it samples was replaced."""
        h, header = self.h, self.h.batch[0]
        rows, tokens, size = int(header["num_rows"]), int(header["num_tokens"]), h.geometry["graphs"][header["graph"]]
        all_tokens, all_rows = int(size["tokens"]), int(size["rows"])
        slots = h.step_array("row_slots", "i4")[:all_rows]
        self._spoil(rows, slots)
        self._count(rows, tokens, all_tokens)
        parts = [pack(*(int(header[name]) for name in _BATCH))]
        parts += [pack(*(h.step_array(name, "i4")[:all_tokens] for name in ("input_ids", "positions", "kv_slots")))]
        parts += [pack(slots, h.step_array("context_lens", "i4")[:all_rows])]
        parts += [pack(h.step_array("query_starts", "i4")[: all_rows + 1], h.rows["sequence"])]
        if not h.is_segment or header["segment"] == 0:
            log, end = h.state.array("log", DECISION_LOG_ENTRY), int(h.scheduler["log_count"])
            entries = log[np.arange(end - rows, end) % len(log)]
            parts += [pack(*(entries[name] for name in _LOG))]
        trace = h.region.trace()
        entry = trace[int(h.scheduler["step"]) % len(trace)]
        return b"".join([*parts, pack(*(int(entry[name]) for name in _TRACE))])

    def _spoil(self, rows: int, slots: np.ndarray[Any, Any]) -> None:
        """Let a row now and then sample nothing, or end the text of its automaton."""
        sampled, params = self.h.step_array("sampled_tokens", "i4"), self.h.state.array("params", SLOT_PARAMS)
        for row in range(rows):
            if self.script.random() < 0.004:
                sampled[row] = CONSTANTS["invalid_logits"]
            elif params["automaton"][slots[row]] and self.script.random() < 0.2:
                sampled[row] = CONSTANTS["grammar_done"]

    def _count(self, rows: int, tokens: int, all_tokens: int) -> None:
        """Count of each kind of launch."""
        h = self.h
        graph, account = int(h.batch[0]["graph"]), h.scheduler["account"]
        self.counts["padded"] += tokens < all_tokens
        self.counts["scoring"] += graph >= int(h.geometry["first_scoring_graph"])
        self.counts["decoding"] += graph < int(h.geometry["num_decode_graphs"])
        self.counts["segments"] += h.is_segment
        self.counts["urgent"] += int(account["step_class"]) == StepClass.URGENT
        self.counts["best_effort"] += int(account["step_class"]) == StepClass.BEST_EFFORT
        is_beside = not h.is_segment and int(h.scheduler["num_segments"]) > 0
        self.counts["preempting"] += is_beside and int(h.scheduler["segmented_best_effort_rows"]) == 0
        self.counts["blocked"] += bool((h.queue_pairs["open"][h.queue_pairs["num_live"] > 0] == 0).any())
        ends, lens = h.step_array("context_lens", "i4")[:rows], h.sequences["num_tokens"][h.rows["sequence"]]
        self.counts["chunks"] += int((ends < lens).sum())


def pack(*values: Any) -> bytes:
    """Return numbers and arrays of them as 64-bit words, each behind the number of its elements."""
    arrays = [np.array(value, "<i8", ndmin=1) for value in values]
    return b"".join(len(array).to_bytes(4, "little") + array.tobytes() for array in arrays)


def play(
    seed: int,
    counts: Counter[str],
    step: Step = lib.blink_step,
    num_snapshots: int = 0,
    speculative_config: str = "",
    **windows: int,
) -> Iterator[bytes]:
    """Yield the trace of one episode; `counts` grows by what happened in it.

    num_snapshots: of the states that a model with recurrent layers keeps of prefixes; windows: see with_windows();
    speculative_config: of the engine's configuration.
    """
    script = random.Random(seed)
    num_pairs, max_num_seqs = script.randint(1, 3), script.choice((2, 4, 8, 12))
    segments = script.choice((0, 0, 3, 4))
    config = small_config(
        num_queue_pairs=num_pairs,
        max_sequences_per_worker=8,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=script.choice((12, 13, 32, 64)),
        block_size=script.choice((8, 8, 16)),
        scheduling_policy=script.choice(("fcfs", "priority")),
        enable_prefix_caching=script.random() < 0.9,
        lease_timeout=LEASE_MS / 1000,
        stall_timeout=3600,
        max_queue_age=AGE_MS / 1000,
        step_target_ms=script.choice((0, 4)),
        speculative_config=speculative_config,
    )
    sizes: dict[str, Callable[[], int]] = {
        "num_blocks": lambda: script.choice((9, 14, 20, 40)),
        "cq_entries": lambda: script.choice((32, 64, 512)),
        "vocab_bytes": lambda: 8,
        "num_automata": lambda: script.randint(1, 4),
        "arena_bytes": lambda: 1 << 18,
        "segment_ns": lambda: MILLISECOND,
        "best_effort_share": lambda: script.choice((1, 100, 400)),
        "overtake_share": lambda: script.choice((0, 500)),
        "urgent_tpot_target_ns": lambda: script.choice((0, 3 * MILLISECOND)),
    }
    drawn = {name: draw() for name, draw in sizes.items()} | {"num_snapshots": num_snapshots, "snapshot_interval": 3}
    drawn |= windows
    with running(config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, step=step, **drawn) as harness:
        episode = Episode(harness, script, segments, num_pairs)
        yield from episode.run()
        counts.update(episode.counts)


# What a random load makes happen in any model.
USUAL_EVENTS = (
    "prefix_hits", "num_preemptions", "num_parked", "segments", "evicted_blocks", "finished_abort", "prefix_resets",
    "num_fast_steps",
)  # fmt: skip


def play_episodes(seeds: range, sizes: Callable[[int], Mapping[str, Any]], step: Step = lib.blink_step) -> Counter[str]:
    """Play whole episodes and return what happened; sizes: what play() takes besides, by seed."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        for _ in play(seed, counts, step, **sizes(seed)):
            pass
    return counts


def digest_block(block: int, counts: Counter[str], step: Step = lib.blink_step) -> str:
    """Return the SHA-256 of the trace of one block of 1,000 passes."""
    digest = hashlib.sha256()
    for episode in range(EPISODES_OF_BLOCK):
        for part in play(FIRST_SEED + block * EPISODES_OF_BLOCK + episode, counts, step):
            digest.update(part)
    return digest.hexdigest()


if __name__ == "__main__":
    recorded = [digest_block(number, Counter()) for number in range(100)]
    Path(sys.argv[1]).write_text(json.dumps(recorded, indent=1) + "\n")
