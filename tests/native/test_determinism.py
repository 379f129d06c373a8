# SPDX-License-Identifier: Apache-2.0
"""The same arrivals lead to the same decisions: in every run, and on any number of lanes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from blink.engine.geometry import build_geometry, graph_sizes
from blink.errors import OverloadedError
from blink.region.layout import DECISION_LOG_ENTRY, RowKind
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from harness import MILLISECOND, Inbox, QueuePair, Step, running, small_config, submission
from many_automata import ask, open_engine

VOCAB = 97
PASSES = 350
CONFIG = small_config(max_num_seqs=5, max_num_batched_tokens=24, scheduling_policy="priority", max_queue_age=0.05)
# What the scheduler decided when this was recorded; whoever means to change its decisions records anew.
GOLDEN = {
    4: "de8a44be3c39f6db6bf3861f9c63b52bbbdb4e40c733ce5e24a8c5d71e760789",
    8: "5628350b69b5c5ea04d35e9e0fd15346c2947b9d37af3189e9ccf0d1602f3630",
}


def decisions(
    seed: int, step: Step, segments: int = 0
) -> tuple[np.ndarray[Any, Any], dict[str, int], dict[int, list[int]]]:
    """Play a script and return the decision log, some statistics and what each sequence delivered.

    segments: with a table of costs, by which best-effort steps are cut into so many.
    """
    script = random.Random(seed)
    with running(CONFIG, num_blocks=20, step=step, cq_entries=64) as h:
        h.region.header["hash_key"] = np.arange(16, dtype=np.uint8)  # the order of evictions must not hang on it
        for graph in range(int(h.geometry["num_graphs"]) if segments else 0):
            h.costs[graph] = (MILLISECOND // 2 * (1 + graph), 1000, segments)
        pairs, inbox = [h.frontend(0), h.frontend(1)], Inbox()
        submitted: list[tuple[QueuePair, int]] = []
        for _ in range(PASSES):
            pair = script.choice(pairs)
            if script.random() < 0.35:
                submitted += [(pair, sequence) for sequence in try_submit(pair, script, h.hashes)]
            if submitted and script.random() < 0.08:
                owner, sequence = script.choice(submitted[-8:])
                owner.cancel(sequence)
            for other in pairs:
                other.renew_lease()
                if script.random() < 0.7:
                    inbox.drain(other)
                # Completions of one step come in any order; what the frontend does next must not hang on it.
                other._free_tags.sort()
            h.step(finish=script.random() < 0.8)
        names = ("num_preemptions", "num_parked", "evicted_blocks", "prefix_hits", "finished_abort", "num_rejected")
        tokens = {sequence: inbox.tokens(sequence) for sequence in inbox.completions}
        return h.decision_log().copy(), {name: h.statistic(name) for name in names}, tokens


def try_submit(pair: QueuePair, script: random.Random, hashes: Callable[[list[int]], bytes]) -> list[int]:
    family, shared = script.randrange(3), script.randrange(45)
    prompt = [(family * 11 + i) % VOCAB for i in range(shared)] + [script.randrange(VOCAB) for _ in range(3)]
    params = SamplingParams(
        max_tokens=script.randint(1, 14),
        best_effort=script.random() < 0.5,
        priority=script.randint(-1, 1),
        logprobs=script.choice([None, 2]),
    )
    try:
        return [
            pair.submit(submission(prompt, (script.randrange(VOCAB),), hashes(prompt), script.randrange(3)), params)
        ]
    except OverloadedError:
        return []


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_same_script_gives_the_same_decisions_twice(seed: int) -> None:
    first, second = decisions(seed, lib.blink_step), decisions(seed, lib.blink_step)
    assert first[0].tobytes() == second[0].tobytes() and first[1:] == second[1:]
    # The comparison is worthless unless all kinds of decision were taken.
    assert len(first[0]) > 400 and min(first[1].values()) > 0, first[1]


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_decisions_are_the_recorded_ones(seed: int) -> None:
    log, statistics, tokens = decisions(seed, lib.blink_step)
    digest = hashlib.sha256()
    for field in ("step", "row", "sequence", "slot", "num_computed", "num_tokens", "last_block"):
        digest.update(log[field].astype("<u4").tobytes())
    digest.update(json.dumps([statistics, sorted(tokens.items())]).encode())
    assert digest.hexdigest() == GOLDEN[seed]


def test_each_step_takes_the_smallest_graph_that_holds_it() -> None:
    log, _, _ = decisions(4, lib.blink_step)
    geometry = build_geometry(CONFIG, max_model_len=64, vocab_size=VOCAB, num_blocks=20)
    sizes, num_decode = graph_sizes(geometry), int(geometry["num_decode_graphs"])
    chosen = set[int]()
    for step in np.unique(log["step"]):
        rows = log[log["step"] == step]
        decodes = bool((rows["kind"] == RowKind.DECODE).all())
        kind = range(num_decode) if decodes else range(num_decode, len(sizes))
        fitting = [i for i in kind if sizes[i][0] >= rows["num_tokens"].sum() and sizes[i][1] >= len(rows)]
        assert set(rows["graph"]) == {fitting[0]}
        chosen.add(fitting[0])
    assert len(chosen) > 3, "too few graphs were in play"


@pytest.mark.parametrize(
    ("lanes", "segments"),
    [(1, 0), (2, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, 0), (7, 0), (3, 3)))],
)
def test_any_number_of_lanes_takes_the_decisions_of_one(
    lanes: int, segments: int, lane_steps: Callable[[int], Step]
) -> None:
    solo, team = decisions(4, lib.blink_step, segments), decisions(4, lane_steps(lanes), segments)
    for field in DECISION_LOG_ENTRY.names or ():
        differs = np.flatnonzero(solo[0][field][: len(team[0])] != team[0][field][: len(solo[0])])
        assert len(differs) == 0, f"{field} differs first at row {differs[0]}"
    assert len(solo[0]) == len(team[0]) and solo[1:] == team[1:]


def automata_decisions(step: Step) -> tuple[bytes, dict[int, list[int]]]:
    """Let five flows of each queue pair ask at random for more automata than there are places."""
    script = random.Random(11)
    with open_engine(5, max_num_seqs=6, step=step) as h:
        pairs, inbox = [h.frontend(0), h.frontend(1)], Inbox()
        known: list[tuple[QueuePair, int]] = []
        most = 0
        for _ in range(70):
            pair = script.choice(pairs)
            if script.random() < 0.5:
                index, flow, count = script.randrange(12), script.randrange(5), script.randint(1, 30)
                with suppress(OverloadedError):
                    known.append((pair, ask(pair, index, flow, count, best_effort=script.random() < 0.3)))
            if known and script.random() < 0.1:
                owner, sequence = script.choice(known[-8:])
                owner.cancel(sequence)
            inbox.drain(*pairs)
            for other in pairs:
                other._free_tags.sort()
            h.step()
            most = max(most, int(h.scheduler["num_automata_used"]))
        assert most == 5, "all places were in use at times"
        return h.decision_log().tobytes(), {sequence: inbox.tokens(sequence) for sequence in inbox.completions}


def test_any_number_of_lanes_shares_automata_as_one_does(lane_steps: Callable[[int], Step]) -> None:
    assert automata_decisions(lane_steps(2)) == automata_decisions(lib.blink_step)
