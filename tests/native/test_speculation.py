# SPDX-License-Identifier: Apache-2.0
"""Drafts change how many tokens a step gives, never which: the scheduler with good, bad and random drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from blink.errors import OverloadedError
from blink.link.queue_pair import KvOrigin, QueuePair, Submission
from blink.region.layout import CqeKind, FinishReason, RowKind, StepResult
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from harness import MILLISECOND, Harness, Inbox, Step, expected_tokens, run_until_finished, running, small_config
from model import Deliveries, Request, answer_of
from random_load import play_episodes

VOCAB, DRAFTS = 97, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
ANSWER = expected_tokens(PROMPT, 54, VOCAB)
ACCEPTED, PLAIN = 1, 0  # CqeTag::rank of a token

Drafter = Callable[[list[int], random.Random], list[int]]
DRAFTERS: dict[str, Drafter] = {
    "oracle": lambda answer, _: answer,
    "liar": lambda answer, _: [token if at % 3 else (token + 1) % VOCAB for at, token in enumerate(answer)],
    "random": lambda answer, chance: [chance.randrange(VOCAB) for _ in answer],
    "none": lambda _, __: [],
}


def spec(tokens: int = DRAFTS, shortest: int = 1) -> str:
    return json.dumps({"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_min": shortest})


def ask(h: Harness, pair: QueuePair, prediction: list[int], stops: tuple[int, ...] = (), **params: Any) -> int:
    entry = Submission(np.asarray(PROMPT, np.int32), stops, 0, h.hashes(PROMPT), prediction=prediction)
    return pair.submit(entry, SamplingParams(**params))


def steps_of(prediction: list[int], stops: tuple[int, ...] = (), **params: Any) -> tuple[int, list[int], FinishReason]:
    """Return the launches that one request takes, its tokens and why it ended."""
    with running(small_config(speculative_config=spec())) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, prediction, stops, **params)
        run_until_finished(h, inbox, [pair], [sequence])
        finish = inbox.finish(sequence)
        assert finish is not None
        return h.num_launches, inbox.tokens(sequence), finish


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 7, 11, 54])
def test_an_answer_has_its_tokens_whatever_was_drafted(drafter: str, max_tokens: int) -> None:
    prediction = DRAFTERS[drafter](ANSWER, random.Random(1))
    launches, tokens, finish = steps_of(prediction, max_tokens=max_tokens)
    assert tokens == ANSWER[:max_tokens] and finish == FinishReason.LENGTH
    if drafter == "oracle":
        assert launches == 1 + -(-(max_tokens - 1) // (1 + DRAFTS))  # the prompt's step gives the first one
    else:
        assert launches <= max_tokens


@pytest.mark.parametrize("at", range(2, 13))
@pytest.mark.parametrize("min_tokens", [0, 5, 9])
def test_a_stop_token_ends_an_answer_at_every_place_of_a_draft(at: int, min_tokens: int) -> None:
    stops, params = frozenset({ANSWER[at]}), SamplingParams(max_tokens=40, min_tokens=min_tokens)
    expected, reason = answer_of(PROMPT, stops, params, VOCAB, 64)
    _, tokens, finish = steps_of(ANSWER, tuple(stops), max_tokens=40, min_tokens=min_tokens)
    assert (tokens, finish) == (expected, reason)


def test_completions_say_what_became_of_the_prediction() -> None:
    wrong = [*ANSWER[:7], *[(token + 1) % VOCAB for token in ANSWER[7:]]]
    with running(small_config(speculative_config=spec(shortest=9))) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, wrong, max_tokens=12)
        run_until_finished(h, inbox, [pair], [sequence])
        ranks = [int(each["rank"]) for each in inbox.of_kind(sequence, CqeKind.TOKEN)]
        assert [int(each["index"]) for each in inbox.of_kind(sequence, CqeKind.TOKEN)] == [*range(12)]
        # The prompt gives the first token. Four drafts and the token behind them are the prediction; of the next four,
        # one is accepted and three are given up.
        assert ranks == [PLAIN, *[ACCEPTED] * 4, PLAIN, ACCEPTED, ACCEPTED + 3, *[PLAIN] * 4]
        assert [h.statistic(name) for name in ("num_drafts", "draft_tokens", "accepted_tokens")] == [2, 8, 5]
        accepted_at = h.region.control["statistics"]["accepted_at"].tolist()
        assert accepted_at[:5] == [2, 1, 1, 1, 0]


def test_a_text_that_repeats_its_prompt_is_drafted_from_it() -> None:
    """The prompt repeats four tokens, and the first generated one goes on with that."""
    repeated = [50, 51, 52, 53] * 6
    text = next([first, *repeated] for first in range(VOCAB) if expected_tokens([first, *repeated], 1, VOCAB) == [50])
    with running(small_config(speculative_config=spec(shortest=2))) as h:
        pair, inbox = h.frontend(), Inbox()
        entry = Submission(np.asarray(text, np.int32), (), 0, b"")
        sequence = pair.submit(entry, SamplingParams(max_tokens=3))
        run_until_finished(h, inbox, [pair], [sequence])
        assert h.statistic("draft_tokens") > 0
        assert inbox.tokens(sequence) == expected_tokens(text, 3, VOCAB)


def test_useless_drafts_let_a_sequence_rest_on_the_fast_path() -> None:
    with running(small_config(speculative_config=spec()), max_model_len=512, num_blocks=128) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, [], max_tokens=110)  # before the fake model's text repeats itself
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == expected_tokens(PROMPT, 110, VOCAB)
        assert h.statistic("accepted_tokens") == 0 and 4 <= h.statistic("num_drafts") <= 4 + 110 // 16
        assert int(h.scheduler["num_fast_steps"]) > 50


def test_a_text_whose_ngrams_are_new_takes_the_fast_path() -> None:
    """No source is known, and none is found: but for the first and the last steps, compose() has nothing to decide."""
    with running(small_config(speculative_config=spec(shortest=9)), max_model_len=512, num_blocks=128) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, [], max_tokens=60)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == expected_tokens(PROMPT, 60, VOCAB)
        assert h.statistic("num_drafts") == 0 and int(h.scheduler["num_fast_steps"]) >= 56


@pytest.mark.parametrize("shortest", [2, 3])
def test_the_fast_path_stops_where_an_ngram_is_known(shortest: int) -> None:
    """The prediction is found at its place in the middle of the answer, with the first token that makes an n-gram."""
    with running(small_config(speculative_config=spec(shortest=shortest)), max_model_len=512, num_blocks=128) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, [96, 95, *ANSWER[20:40]], max_tokens=44)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == ANSWER[:44]
        assert h.statistic("accepted_tokens") >= 20 - shortest - DRAFTS
        assert int(h.scheduler["num_fast_steps"]) > 10


def test_where_time_is_not_won_no_draft_is_verified() -> None:
    """The table says that a step of two rows takes twice as long as one of one row: no draft is worth that."""
    for per_row, is_drafted in ((MILLISECOND, False), (1000, True)):
        with running(small_config(speculative_config=spec())) as h:
            for graph in range(int(h.geometry["num_graphs"])):
                rows = int(h.geometry["graphs"][graph]["rows"])
                h.costs[graph] = (MILLISECOND // 10 + per_row * rows, 0, 1)
            pair, inbox = h.frontend(), Inbox()
            sequence = ask(h, pair, DRAFTERS["liar"](ANSWER, random.Random(0)), max_tokens=40)
            run_until_finished(h, inbox, [pair], [sequence])
            assert inbox.tokens(sequence) == ANSWER[:40]
            assert (h.statistic("draft_tokens") > 0) == is_drafted


def test_blocks_of_accepted_tokens_are_cached_and_those_of_rejected_ones_are_not() -> None:
    for drafter in DRAFTERS:
        with running(small_config(speculative_config=spec())) as h:
            pair, inbox = h.frontend(), Inbox()
            prediction = DRAFTERS[drafter](ANSWER, random.Random(3))
            first = Submission(np.asarray(PROMPT, np.int32), (), 0, h.hashes(PROMPT), origin=KvOrigin(h.hash_root()),
                               prediction=prediction)  # fmt: skip
            sequence = pair.submit(first, SamplingParams(max_tokens=30))
            run_until_finished(h, inbox, [pair], [sequence])
            text = [*PROMPT, *ANSWER[:30]]
            again = Submission(np.asarray(text, np.int32), (), 0, h.hashes(text))
            second = pair.submit(again, SamplingParams(max_tokens=2))
            run_until_finished(h, inbox, [pair], [second])
            assert inbox.cached(second) == (len(text) - 1) // 8 * 8, drafter
            assert inbox.tokens(second) == expected_tokens(text, 2, VOCAB)


def test_drafts_never_preempt_anybody() -> None:
    """Four sequences fill the cache to the last block; with drafts none of them loses its blocks."""
    preempted = []
    for config in ("", spec()):
        with running(small_config(speculative_config=config), num_blocks=16) as h:
            pair, inbox = h.frontend(), Inbox()
            sequences = [ask(h, pair, ANSWER, max_tokens=22) for _ in range(4)]
            run_until_finished(h, inbox, [pair], sequences)
            assert all(inbox.tokens(sequence) == ANSWER[:22] for sequence in sequences)
            preempted.append(h.statistic("num_preemptions"))
    assert preempted == [0, 0]


class Crowd:
    """Random frontends with random predictions, each of whose completions is judged."""

    def __init__(self, h: Harness, chance: random.Random) -> None:
        self.h, self.chance, self.prompts = h, chance, list[list[int]]()
        self.pairs = [h.frontend(0), h.frontend(1)]
        self.deliveries = [self._deliveries() for _ in self.pairs]
        self.verify_rows = 0

    def _deliveries(self) -> Deliveries:
        return Deliveries(VOCAB, 8, self.prompts)

    def submit(self, index: int) -> None:
        chance = self.chance
        prompt = [(chance.randrange(3) * 11 + i) % VOCAB for i in range(chance.randrange(30))] + [
            chance.randrange(VOCAB)
        ]
        max_tokens = chance.choice((1, 3, 9, 30))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(chance.choice((0, 0, 4)), max_tokens),
            logprobs=chance.choice((None, None, 2)),
            best_effort=chance.random() < 0.4,
            priority=chance.randint(-1, 1),
        )
        stops = frozenset(chance.sample(range(VOCAB), chance.choice((0, 0, 3))))
        answer, reason = answer_of(prompt, stops, params, VOCAB, 64)
        prediction = DRAFTERS[chance.choice([*DRAFTERS])](answer, chance)
        entry = Submission(
            np.asarray(prompt, np.int32), tuple(stops), 0, self.h.hashes(prompt), origin=KvOrigin(self.h.hash_root()),
            prediction=prediction,
        )  # fmt: skip
        with suppress(OverloadedError):
            sequence = self.pairs[index].submit(entry, params)
            request = Request(prompt, stops, params, answer, reason, prompt + answer)
            self.deliveries[index].requests[sequence] = request
            self.prompts.append(request.known)

    def live(self, reading: float) -> None:
        for index, pair in enumerate(self.pairs):
            pair.renew_lease()
            if self.chance.random() < 0.25:
                self.submit(index)
            if (live := self.deliveries[index].live()) and self.chance.random() < 0.03:
                sequence = self.chance.choice(live)
                self.deliveries[index].requests[sequence].cancelled = True
                pair.cancel(sequence)
            if self.chance.random() < reading:
                for completion in pair.drain():
                    self.deliveries[index].observe(completion)

    def step(self) -> None:
        if self.h.step(finish=self.chance.random() < 0.9) == StepResult.LAUNCHED:
            self.verify_rows += int((self.h.rows["kind"] == RowKind.VERIFY).sum())

    def lose_a_lease(self, milliseconds: float) -> None:
        """Let a frontend be silent for too long, with rows in flight; its successor starts with nothing."""
        self.h.step(finish=False)
        for _ in range(3):
            self.pairs[1].renew_lease()
            self.h.step(milliseconds)
        self.pairs[0], self.deliveries[0] = self.h.frontend(0), self._deliveries()


def judge_crowd(seed: int, passes: int, step: Step = lib.blink_step, speculative_config: str = "") -> Crowd:
    """Play a crowd and see that all that lives comes to its end; speculative_config: other than n-gram drafts."""
    chance = random.Random(seed)
    ngram = spec(chance.choice((1, 3, 15)), chance.choice((1, 2)))
    config = small_config(
        speculative_config=speculative_config or ngram,
        scheduling_policy=chance.choice(("fcfs", "priority")),
        lease_timeout=0.5,
        stall_timeout=3600,
    )
    segments = chance.choice((0, 0, 3))
    with running(config, num_blocks=chance.choice((12, 40)), cq_entries=64, step=step, segment_ns=MILLISECOND) as h:
        for graph in range(int(h.geometry["num_graphs"]) if segments else 0):
            h.costs[graph] = (MILLISECOND // 2 * (4 + graph), 0, segments)
        crowd = Crowd(h, chance)
        for number in range(passes):
            crowd.live(1.0 if number // 25 % 3 else 0.1)
            crowd.step()
            if number % 97 == 96:
                crowd.lose_a_lease(501)
        for _ in range(2000):
            for index, pair in enumerate(crowd.pairs):
                pair.renew_lease()
                for completion in pair.drain():
                    crowd.deliveries[index].observe(completion)
            if not any(each.live() for each in crowd.deliveries):
                break
            h.step()
        assert not any(each.live() for each in crowd.deliveries), "a sequence does not come to its end"
        return crowd


def test_a_crowd_gets_what_it_would_without_drafts() -> None:
    assert sum(judge_crowd(seed, 150).verify_rows for seed in range(4)) > 50


def test_a_step_with_drafts_is_launched_whole_though_its_larger_graph_may_be_preempted() -> None:
    """Costs that are learned need not rise with a graph's size: here that of the drafts is the cheaper one."""
    judge_crowd(14, 500)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_crowds_of_a_hundred_thousand_passes_get_what_they_would_without_drafts() -> None:
    assert sum(judge_crowd(seed, 500).verify_rows for seed in range(200)) > 10_000


SPECULATING = {"speculative_config": spec(3)}


def test_a_random_load_with_drafts_breaks_no_invariant() -> None:
    counts = play_episodes(range(4), lambda _: SPECULATING)
    assert min(counts[name] for name in ("num_drafts", "accepted_tokens", "num_preemptions", "segments")) > 0, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_long_random_load_with_drafts_breaks_no_invariant() -> None:
    counts = play_episodes(range(100, 500), lambda _: SPECULATING)
    assert counts["num_drafts"] > 1000 and counts["accepted_tokens"] > 30


@pytest.mark.long
def test_any_number_of_lanes_makes_the_same_drafts(lane_steps: Callable[[int], Step]) -> None:
    plain = play_episodes(range(2), lambda _: SPECULATING)
    assert play_episodes(range(2), lambda _: SPECULATING, lane_steps(3)) == plain
