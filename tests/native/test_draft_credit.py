# SPDX-License-Identifier: Apache-2.0
"""Speculation is never slower by more than its share: simulated decoding whose steps take what a table says."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from blink.link.queue_pair import QueuePair, Submission
from blink.region.layout import StepResult
from blink.sampling_params import SamplingParams
from harness import MILLISECOND, Harness, Inbox, expected_tokens, running, small_config

VOCAB, DRAFTS = 97, 7
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LONG = 900  # tokens of an answer
ANSWER = expected_tokens(PROMPT, LONG, VOCAB)
USELESS = [random.Random(2).randrange(VOCAB) for _ in ANSWER]
Milliseconds = Mapping[int, float]  # of a step of so many rows
STEEP: Milliseconds = {1: 15, 2: 24, 4: 36, 8: 62, 16: 96, 32: 180}
FLAT: Milliseconds = {1: 3.65, 2: 3.66, 4: 3.7, 8: 3.8, 16: 4.0, 32: 4.3}
LINEAR: Milliseconds = {rows: rows * 5.0 for rows in STEEP}
TABLES = {"steep": STEEP, "flat": FLAT, "linear": LINEAR}


def cost_of(table: Milliseconds, rows: int) -> float:
    return next(table[most] for most in sorted(table) if rows <= most)


class Clock:
    """A scheduler whose steps take what the table of the truth says; another one may be what it believes at first."""

    def __init__(self, h: Harness, truth: Milliseconds, believed: Milliseconds) -> None:
        self.h, self.truth = h, truth
        self.num_drafts = list[int]()  # so far, at each step
        for graph in range(int(h.geometry["num_graphs"])):
            rows = int(h.geometry["graphs"][graph]["tokens"])
            h.costs[graph] = (int(cost_of(believed, min(rows, 32)) * MILLISECOND), 0, 1)

    def decode(self, pair: QueuePair, predictions: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return the milliseconds in which answers to one prompt are decoded together, each with its prediction."""
        inbox = Inbox()
        sequences = [self.submit(pair, prediction, max_tokens) for prediction in predictions]
        spent = step = 0.0
        while pair.num_live:
            launched = self.h.step(step) == StepResult.LAUNCHED
            step = cost_of(self.truth, int(self.h.batch[0]["num_tokens"])) if launched else 0.01
            spent += step
            self.num_drafts.append(self.h.statistic("num_drafts"))
            inbox.drain(pair)
            pair.renew_lease()
        assert all(inbox.tokens(sequence) == ANSWER[:max_tokens] for sequence in sequences)
        return spent

    def submit(self, pair: QueuePair, prediction: Sequence[int], max_tokens: int) -> int:
        entry = Submission(np.asarray(PROMPT, np.int32), (), 0, b"", prediction=prediction)
        return pair.submit(entry, SamplingParams(max_tokens=max_tokens))


def decode(
    phases: Sequence[Sequence[Sequence[int]]],
    truth: Milliseconds,
    *,
    believed: Milliseconds | None = None,
    drafts: int = DRAFTS,
    max_tokens: int = LONG,
) -> list[float]:
    """Return the milliseconds of each phase: of answers that are decoded together. drafts: 0: no speculation."""
    config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1} if drafts else {}
    options = small_config(speculative_config=json.dumps(config), lease_timeout=3600, stall_timeout=3600)
    with running(options, max_model_len=1024, num_blocks=640) as h:
        clock, pair = Clock(h, truth, believed or truth), h.frontend()
        return [clock.decode(pair, predictions, max_tokens) for predictions in phases]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("table", TABLES)
def test_useless_drafts_cost_no_more_than_their_share(table: str, rows: int) -> None:
    """What an engine begins with is 8 tokens, and one in 128 is earned."""
    truth = TABLES[table]
    [plain] = decode([[[]] * rows], truth, drafts=0)
    [found] = decode([[USELESS] * rows], truth)
    token = plain / (rows * LONG)
    assert found <= plain * 1.01 + 13 * token  # the last step may be beyond the credit by its own error


@pytest.mark.parametrize("rows", [1, 4])
def test_a_table_that_is_wrong_costs_no_more(rows: int) -> None:
    """Drafts seem to be nearly free, and are not."""
    [plain] = decode([[[]] * rows], STEEP, drafts=0)
    [found] = decode([[USELESS] * rows], STEEP, believed=dict.fromkeys(STEEP, 15.0))
    assert found <= plain * 1.02 + 30 * plain / (rows * LONG)


@pytest.mark.parametrize("table", ["steep", "flat"])
def test_right_drafts_win(table: str) -> None:
    [plain] = decode([[[]]], TABLES[table], drafts=0)
    [found] = decode([[ANSWER]], TABLES[table])
    assert found < plain * {"steep": 0.62, "flat": 0.15}[table]


def test_where_every_row_costs_the_same_no_draft_is_verified() -> None:
    [plain] = decode([[[]]], LINEAR, drafts=0, max_tokens=200)
    assert decode([[ANSWER]], LINEAR, max_tokens=200) == [plain]


def test_drafts_that_were_useless_for_long_do_not_keep_others_from_theirs() -> None:
    _, plain = decode([[[]], [[]]], STEEP, drafts=0, max_tokens=400)
    _, found = decode([[USELESS], [ANSWER]], STEEP, max_tokens=400)
    assert found < 0.75 * plain


def test_a_cost_that_was_too_high_once_fades() -> None:
    """Steps with drafts seem to take ten times as long for a while. Later they are tried again."""
    config = small_config(speculative_config='{"num_speculative_tokens": 4}', lease_timeout=3600, stall_timeout=3600)
    with running(config, max_model_len=1024, num_blocks=640) as h:
        clock, pair = Clock(h, FLAT, FLAT), h.frontend()
        usual = clock.decode(pair, [ANSWER], 400)
        clock.truth = {rows: cost * (10 if rows > 1 else 1) for rows, cost in FLAT.items()}
        disturbed = clock.decode(pair, [ANSWER], 400)
        clock.truth = FLAT
        drafts = clock.num_drafts[-1]
        while clock.decode(pair, [ANSWER], 400) > 1.2 * usual:
            assert len(clock.num_drafts) < 20_000, "drafts are never tried again"
        assert clock.num_drafts[-1] > drafts and disturbed > 2 * usual


def test_a_sequence_rests_longer_while_nothing_is_accepted() -> None:
    """Drafts cost nothing: the credit lets all of them pass."""
    config = small_config(
        speculative_config='{"num_speculative_tokens": 3, "prompt_lookup_min": 1}', lease_timeout=3600
    )
    with running(config, max_model_len=1024, num_blocks=640) as h:
        clock = Clock(h, FLAT, FLAT)
        clock.decode(h.frontend(), [USELESS], LONG)
        gaps = [gap for gap in np.diff(np.flatnonzero(np.diff(clock.num_drafts))).tolist() if gap > 4]
        assert len(gaps) >= 3 and max(gaps) > 3 * min(gaps), gaps
