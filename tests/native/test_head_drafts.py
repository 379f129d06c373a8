# SPDX-License-Identifier: Apache-2.0
"""Drafts that a model's head writes beside its samples change how many tokens a step gives, never which."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from blink.engine.geometry import build_geometry
from blink.link.queue_pair import Submission
from blink.region.layout import FinishReason, RowKind, StepResult, struct_dtype
from blink.sampling_params import SamplingParams
from harness import Harness, Inbox, expected_tokens, run_until_finished, running, small_config
from model import answer_of
from test_speculation import ANSWER, DRAFTERS, DRAFTS, PROMPT, VOCAB, Drafter, ask

HEAD = json.dumps({"method": "eagle3", "model": "head", "num_speculative_tokens": DRAFTS})


class Head:
    """The fake model's head: it drafts behind every row that samples, and may be late, long or wild."""

    def __init__(self, h: Harness, drafter: Drafter, seed: int = 0) -> None:
        self.h, self.drafter, self.chance = h, drafter, random.Random(seed)
        self.drafts = h.state.array("head_drafts", struct_dtype("HeadDraft"))
        self._compute, h.compute = h.compute, self.compute

    def compute(self) -> None:
        self._compute()
        h, rows = self.h, self.h.rows
        slots, lens, sampled = (h.step_array(name, "i4") for name in ("row_slots", "context_lens", "sampled_tokens"))
        ids, starts = h.step_array("input_ids", "i4"), h.step_array("query_starts", "i4")
        last: dict[int, int] = {}
        for row in range(len(rows)):
            before = last.get(int(slots[row]))
            if before is None or (before == row - 1 and ids[starts[row]] == sampled[before]):
                last[int(slots[row])] = row
        for slot, row in last.items():
            text = [*h.tokens[slot, : lens[row]].tolist(), int(sampled[row])]
            self.write(slot, text)

    def write(self, slot: int, text: list[int]) -> None:
        draft = self.drafter(expected_tokens(text, DRAFTS, VOCAB), self.chance)
        entry = self.drafts[slot : slot + 1]
        entry["num_tokens"], entry["count"] = len(text), len(draft)
        entry["tokens"][0, : len(draft)] = draft


def play(drafter: str, stops: tuple[int, ...] = (), **params: Any) -> tuple[dict[str, int], list[int], FinishReason]:
    """Return what one request takes, its tokens and why it ended."""
    with running(small_config(speculative_config=HEAD), max_model_len=512, num_blocks=128) as h:
        Head(h, DRAFTERS[drafter])
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, [], stops, **params)
        run_until_finished(h, inbox, [pair], [sequence])
        finish = inbox.finish(sequence)
        assert finish is not None
        counts = {name: h.statistic(name) for name in ("num_drafts", "accepted_tokens")}
        counts |= {"launches": h.num_launches, "fast steps": int(h.scheduler["num_fast_steps"])}
        return counts, inbox.tokens(sequence), finish


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 7, 11, 54])
def test_an_answer_has_its_tokens_whatever_the_head_writes(drafter: str, max_tokens: int) -> None:
    counts, tokens, finish = play(drafter, max_tokens=max_tokens)
    assert tokens == ANSWER[:max_tokens] and finish == FinishReason.LENGTH
    if drafter == "oracle":
        assert counts["launches"] == 1 + -(-(max_tokens - 1) // (1 + DRAFTS))  # the prompt's step gives the first one
    else:
        assert counts["launches"] <= max_tokens


@pytest.mark.parametrize("at", range(2, 13))
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_a_stop_token_ends_an_answer_at_every_place_of_a_draft(at: int, min_tokens: int) -> None:
    stops, params = frozenset({ANSWER[at]}), SamplingParams(max_tokens=40, min_tokens=min_tokens)
    expected, reason = answer_of(PROMPT, stops, params, VOCAB, 64)
    _, tokens, finish = play("oracle", tuple(stops), max_tokens=40, min_tokens=min_tokens)
    assert (tokens, finish) == (expected, reason)


def test_a_useless_head_lets_a_sequence_rest_on_the_fast_path() -> None:
    counts, tokens, _ = play("random", max_tokens=110)
    assert tokens == expected_tokens(PROMPT, 110, VOCAB)
    assert counts["accepted_tokens"] < 8 and 4 <= counts["num_drafts"] <= 16
    assert counts["fast steps"] > 50


def test_a_draft_of_another_text_or_of_no_token_is_not_taken() -> None:
    """One for a text that is a token longer, one whose token no vocabulary has, and one that is longer than may be."""
    for change in ({"num_tokens": 1}, {"token": VOCAB}, {"token": -1}, {"count": 1000}):
        with running(small_config(speculative_config=HEAD)) as h:
            head = Head(h, DRAFTERS["oracle"])
            inner = head.write

            def write(slot: int, text: list[int], inner: Any = inner, change: Any = change, head: Any = head) -> None:
                inner(slot, text)
                entry = head.drafts[slot : slot + 1]
                entry["num_tokens"] += change.get("num_tokens", 0)
                entry["count"] = change.get("count", entry["count"])
                entry["tokens"][0, 0] = change.get("token", entry["tokens"][0, 0])

            head.write = write
            pair, inbox = h.frontend(), Inbox()
            sequence = ask(h, pair, [], max_tokens=20)
            run_until_finished(h, inbox, [pair], [sequence])
            assert inbox.tokens(sequence) == ANSWER[:20]
            assert (h.statistic("num_drafts") > 0) == ("count" in change), change


def test_a_slot_s_next_request_takes_no_draft_of_the_one_before() -> None:
    """The second prompt is computed while the head says nothing, and has the length that the draft was for."""
    with running(small_config(speculative_config=HEAD, max_num_seqs=1)) as h:
        head = Head(h, DRAFTERS["oracle"])
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [ask(h, pair, [], max_tokens=2)])
        assert int(head.drafts["num_tokens"].max()) == len(PROMPT) + 2
        head.write = lambda slot, text: None  # noqa: ARG005
        other = Submission(np.asarray([*PROMPT[1:], 8, 8], np.int32), (), 0, b"")
        before = h.statistic("num_drafts")
        for _ in range(3):  # whichever slot it is given
            sequence = pair.submit(other, SamplingParams(max_tokens=4))
            run_until_finished(h, inbox, [pair], [sequence])
            assert inbox.tokens(sequence) == expected_tokens([*PROMPT[1:], 8, 8], 4, VOCAB)
        assert h.statistic("num_drafts") == before


def test_a_prediction_comes_before_the_head() -> None:
    with running(small_config(speculative_config=HEAD)) as h:
        Head(h, DRAFTERS["random"])
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, ANSWER, max_tokens=21)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == ANSWER[:21] and h.statistic("accepted_tokens") == 16


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_crowd_gets_its_answers_whatever_the_head_writes(drafter: str) -> None:
    """Requests of all lengths share a small cache: rows end, are preempted and resumed between drafts."""
    chance = random.Random(7)
    with running(small_config(speculative_config=HEAD, max_sequences_per_worker=64), num_blocks=14) as h:
        Head(h, DRAFTERS[drafter])
        pair, inbox = h.frontend(), Inbox()
        asked: dict[int, tuple[list[int], int]] = {}
        verified = 0
        for _ in range(40):
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))]
            wanted = chance.choice((1, 3, 9, 25))
            entry = Submission(np.asarray(prompt, np.int32), (), 0, h.hashes(prompt))
            asked[pair.submit(entry, SamplingParams(max_tokens=wanted))] = prompt, wanted
            for _ in range(chance.randrange(6)):
                if h.step() == StepResult.LAUNCHED:
                    verified += int((h.rows["kind"] == RowKind.VERIFY).sum())
        run_until_finished(h, inbox, [pair], [*asked])
        for sequence, (prompt, wanted) in asked.items():
            assert inbox.tokens(sequence) == expected_tokens(prompt, wanted, VOCAB)
        assert (verified > 0) == (drafter != "none")
        assert (h.statistic("accepted_tokens") > 20) == (drafter == "oracle")


def test_a_step_takes_the_graph_with_guesses_only_where_a_draft_would_be_of_use() -> None:
    """Not within a prompt, and not while a sequence rests."""
    config = small_config(speculative_config=HEAD)
    geometry = build_geometry(config, max_model_len=512, vocab_size=VOCAB, num_blocks=128, captures_larger=True)
    num_plain, num_graphs = int(geometry["num_plain_graphs"]), int(geometry["num_graphs"])
    sizes: dict[str, Any] = {"graphs": geometry["graphs"], "num_graphs": num_graphs, "num_plain_graphs": num_plain}
    assert num_graphs == 2 * num_plain
    with running(config, max_model_len=512, num_blocks=128, **sizes) as h:
        head = Head(h, DRAFTERS["random"])
        pair, inbox = h.frontend(), Inbox()
        prompt = [at % VOCAB for at in range(100)]
        sequence = pair.submit(Submission(np.asarray(prompt, np.int32), (), 0, b""), SamplingParams(max_tokens=150))
        seen = set[tuple[bool, bool]]()
        while not inbox.finish(sequence):
            num_fast = int(h.scheduler["num_fast_steps"])
            launched = h.step() == StepResult.LAUNCHED
            inbox.drain(pair)
            if not launched:
                continue
            is_fast = int(h.scheduler["num_fast_steps"]) > num_fast
            slot, end = int(h.step_array("row_slots", "i4")[0]), int(h.step_array("context_lens", "i4")[0])
            rests = end + 1 < int(head.drafts["rests_until"][slot])
            is_wanted = end >= len(prompt) and not rests
            guesses = int(h.batch[0]["graph"]) >= num_plain
            assert guesses == is_wanted or (is_fast and not guesses)  # the last step of a rest
            seen.add((end >= len(prompt), guesses))
        assert seen == {(False, False), (True, True), (True, False)}
        assert inbox.tokens(sequence) == expected_tokens(prompt, 150, VOCAB)
