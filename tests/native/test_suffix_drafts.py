# SPDX-License-Identifier: Apache-2.0
"""Suffix drafts: copies of other requests' recent answers, the longer the more of the text they match."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from blink.link.queue_pair import NO_HASH_ROOT, KvOrigin, Submission
from blink.region.layout import RowKind, StepResult
from blink.sampling_params import SamplingParams
from harness import Harness, Inbox, Step, expected_tokens, run_until_finished, running, small_config
from random_load import play_episodes
from test_speculation import judge_crowd

VOCAB, LENGTH = 97, 36
FROM_ANSWERS = 2  # DraftOrigin::kAnswers


def has_new_bigrams(prompt: list[int]) -> bool:
    """Say whether a text's pairs of tokens all differ: nothing is drafted from the text itself."""
    text = [*prompt, *expected_tokens(prompt, LENGTH, VOCAB)]
    return len({*itertools.pairwise(text)}) == len(text) - 1


# Behind 24 tokens of any text the fake model writes the same.
BEGINNINGS = ([first, 2 * first, *range(60, 84)] for first in range(48))
PROMPTS = [prompt for prompt in BEGINNINGS if has_new_bigrams(prompt)]


def spec(**fields: Any) -> str:
    names = {"depth": "max_tree_depth", "answers": "max_cached_requests"}
    names |= {"factor": "max_spec_factor", "chance": "min_token_prob"}
    values = {f"suffix_decoding_{names[name]}": value for name, value in fields.items() if name in names}
    return json.dumps({"method": "suffix"} | values | {k: v for k, v in fields.items() if k not in names})


class Machine:
    """A scheduler with suffix drafts, and one frontend."""

    def __init__(self, h: Harness) -> None:
        self.h, self.pair, self.inbox = h, h.frontend(), Inbox()

    def ask(self, prompt: Sequence[int], salt: bytes | None = b"", max_tokens: int = LENGTH) -> int:
        root = NO_HASH_ROOT if salt is None else self.h.hash_root(salt)
        entry = Submission(np.asarray(prompt, np.int32), (), 0, b"", origin=KvOrigin(root))
        return self.pair.submit(entry, SamplingParams(max_tokens=max_tokens))

    def answer(self, prompt: Sequence[int], salt: bytes | None = b"", max_tokens: int = LENGTH) -> list[int]:
        """Return how many tokens each draft had, once the answer is the right one."""
        sequence, drafts = self.ask(prompt, salt, max_tokens), list[int]()
        while self.inbox.finish(sequence) is None:
            if self.h.step() == StepResult.LAUNCHED:
                drafts += [int(row["num_tokens"]) - 1 for row in self.h.rows if row["kind"] == RowKind.VERIFY]
            self.inbox.drain(self.pair)
        assert self.inbox.tokens(sequence) == expected_tokens([*prompt], max_tokens, VOCAB)
        return drafts


def machine(config: str, **sizes: int) -> Any:
    return running(small_config(speculative_config=config, enable_prefix_caching=False), num_blocks=64, **sizes)


def test_an_answer_of_another_request_is_drafted_from_its_second_token_on() -> None:
    with machine(spec(chance=0)) as h:
        m = Machine(h)
        assert m.answer(PROMPTS[0]) == []
        # The match grows by the draft and the token behind it: 2 tokens, 5, 11, 23; then the answer's end is the limit.
        assert m.answer(PROMPTS[0]) == [2, 5, 11, 12]
        assert h.statistic("accepted_tokens") == h.statistic("draft_tokens") == 30


@pytest.mark.parametrize(
    ("fields", "drafts"),
    [
        ({"factor": 2.0}, [4, 14, 13]),
        ({"factor": 0.5}, [1, 2, 3, 5, 8, 9]),
        ({"depth": 4}, [2, 4, 4, 4, 4, 4, 4]),
        ({"num_speculative_tokens": 3}, [2, 3, 3, 3, 3, 3, 3, 3, 2]),
        ({"answers": 0}, []),
    ],
)
def test_drafts_are_as_long_as_the_configuration_says(fields: dict[str, Any], drafts: list[int]) -> None:
    with machine(spec(**{"chance": 0, **fields})) as h:
        m = Machine(h)
        m.answer(PROMPTS[0])
        assert m.answer(PROMPTS[0]) == drafts


def test_a_draft_ends_where_its_tokens_are_no_longer_likely() -> None:
    """A first draft's tokens are taken to be accepted with 0.8 each: three with 0.51, four with 0.41."""
    with machine(spec(factor=8, chance=0.5)) as h:
        m = Machine(h)
        m.answer(PROMPTS[0])
        found = m.answer(PROMPTS[0])
        assert found[0] == 3 and found == sorted(found[:-1]) + found[-1:] and max(found) > 3


@pytest.mark.parametrize(("first", "second"), [(b"a", b"b"), (None, None), (b"a", None), (None, b"a")])
def test_answers_of_another_salt_are_not_drafted(first: bytes | None, second: bytes | None) -> None:
    with machine(spec()) as h:
        m = Machine(h)
        m.answer(PROMPTS[0], first)
        assert m.answer(PROMPTS[0], second) == []
        assert (m.answer(PROMPTS[0], second) == []) == (second is None)  # whose own answer is there by now


def test_only_so_many_answers_are_kept() -> None:
    with machine(spec(answers=2)) as h:
        m = Machine(h)
        for prompt in (PROMPTS[0], PROMPTS[1]):
            m.answer(prompt)
        assert m.answer(PROMPTS[0]) != []  # of the last two
        for prompt in (PROMPTS[2], PROMPTS[3]):
            m.answer(prompt)
        assert m.answer(PROMPTS[0]) == []


def test_an_answer_that_is_cancelled_is_not_kept() -> None:
    with machine(spec()) as h:
        m = Machine(h)
        sequence = m.ask(PROMPTS[0])
        for _ in range(20):
            h.step()
        m.pair.cancel(sequence)
        run_until_finished(h, m.inbox, [m.pair], [sequence])
        assert int(h.scheduler["last_answer"]) == 0 and m.answer(PROMPTS[0]) == []


def test_the_oldest_answers_are_written_over() -> None:
    with machine(spec(), answer_tokens=128, answer_entries=512) as h:
        m = Machine(h)
        for prompt in PROMPTS[:5]:
            m.answer(prompt)
        assert m.answer(PROMPTS[0]) == [] and m.answer(PROMPTS[4]) != []


def test_answers_are_forgotten_before_their_places_outgrow_a_word() -> None:
    with machine(spec()) as h:
        m = Machine(h)
        h.scheduler["answer_head"] = h.scheduler["num_indexed_answer_tokens"] = (1 << 31) - LENGTH // 2
        m.answer(PROMPTS[0])
        m.answer(PROMPTS[1])  # whose first launch indexes the answer before, and forgets it
        assert int(h.scheduler["answer_head"]) == LENGTH + 1
        assert m.answer(PROMPTS[0]) == [] and m.answer(PROMPTS[1]) != []


def test_the_longer_match_is_the_draft() -> None:
    """The text ends with four tokens of an answer. Its own prompt has the last two of them, with another one behind."""
    answer = expected_tokens(PROMPTS[0], LENGTH, VOCAB)
    texts = [
        (k, [answer[k], answer[k + 1], 96, z, *answer[k - 2 : k + 1]]) for k in range(2, LENGTH - 6) for z in range(96)
    ]
    k, prompt = next((k, text) for k, text in texts if expected_tokens(text, 1, VOCAB) == [answer[k + 1]])
    with machine(spec(chance=0)) as h:
        m = Machine(h)
        m.answer(PROMPTS[0])
        m.ask(prompt, max_tokens=9)
        while h.step() != StepResult.LAUNCHED or h.rows[0]["kind"] != RowKind.VERIFY:
            pass
        assert int(h.rows[0]["num_tokens"]) == 5
        assert h.step_array("input_ids", "i4")[1:5].tolist() == answer[k + 2 : k + 6]


def test_a_crowd_of_two_salts_gets_its_tokens_and_no_draft_of_the_other() -> None:
    """Each draft from recent answers stands in an answer of its own salt, though the ring is small."""
    chance, seen = random.Random(5), 0
    with machine(spec(chance=0), answer_tokens=256, answer_entries=1024) as h:
        m, salts = Machine(h), (b"a", b"b")
        asked = dict[int, tuple[list[int], bytes]]()
        known: dict[bytes, list[list[int]]] = {salt: [] for salt in salts}
        for _ in range(250):
            live = [sequence for sequence in asked if m.inbox.finish(sequence) is None]
            if len(live) < 4 and chance.random() < 0.4:
                prompt, salt = chance.choice(PROMPTS[:6]), chance.choice(salts)
                asked[m.ask(prompt, salt, chance.choice((9, LENGTH)))] = prompt, salt
                known[salt].append(expected_tokens(prompt, LENGTH, VOCAB))
            if h.step() == StepResult.LAUNCHED:
                seen += sum(is_known(h, row, asked, known) for row in h.rows if row["kind"] == RowKind.VERIFY)
            m.inbox.drain(m.pair)
        for sequence, (prompt, _) in asked.items():
            found = m.inbox.tokens(sequence)
            assert found == expected_tokens(prompt, LENGTH, VOCAB)[: len(found)]
    assert seen > 10, seen


def is_known(h: Harness, row: Any, asked: dict[int, Any], known: dict[bytes, list[list[int]]]) -> bool:
    """Judge a draft from recent answers; say whether it is one."""
    sequence = h.sequences[row["sequence"]]
    if sequence["drafting"]["origin"] != FROM_ANSWERS:
        return False
    first, count = int(row["first_token"]) + 1, int(row["num_tokens"]) - 1
    draft = h.step_array("input_ids", "i4")[first : first + count].tolist()
    answers = known[asked[int(sequence["sqe"]["sequence"])][1]]
    assert any(draft == answer[at : at + count] for answer in answers for at in range(LENGTH))
    return True


SUFFIX = {"speculative_config": spec(answers=50, chance=0)}


def test_a_random_load_with_suffix_drafts_breaks_no_invariant() -> None:
    counts = play_episodes(range(4), lambda _: SUFFIX)
    assert min(counts[name] for name in ("num_drafts", "num_preemptions", "segments")) > 0, counts


def test_a_crowd_gets_what_it_would_without_suffix_drafts() -> None:
    assert sum(judge_crowd(seed, 150, speculative_config=spec(answers=9)).verify_rows for seed in range(4)) > 50


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_passes_with_suffix_drafts_give_what_they_would_without() -> None:
    """After each pass the invariants are checked; predictions are an oracle's, a liar's, random ones or none."""
    config = spec(answers=9)
    assert sum(judge_crowd(seed, 500, speculative_config=config).verify_rows for seed in range(200)) > 10_000


@pytest.mark.long
def test_any_number_of_lanes_makes_the_same_suffix_drafts(lane_steps: Callable[[int], Step]) -> None:
    plain = play_episodes(range(4), lambda _: SUFFIX)
    assert play_episodes(range(4), lambda _: SUFFIX, lane_steps(3)) == plain
