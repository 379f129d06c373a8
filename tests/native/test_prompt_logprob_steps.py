# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompt tokens: each is delivered once and in order, whatever chunks, queues and preemptions do."""

from __future__ import annotations

import pytest

from blink.region.layout import CqeKind
from harness import Harness, Inbox, expected_tokens, run_until_finished, running, small_config, submit

VOCAB = 97


def make_prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i + 5 * i + salt) % VOCAB for i in range(length)]


def check_prompt_logprobs(inbox: Inbox, sequence: int, prompt: list[int], num_top: int) -> None:
    """The completions before the first token are those of positions 1, 2, ..., each behind its rivals."""
    found = [c for c in inbox.completions[sequence] if c["kind"] != CqeKind.ADMITTED]
    logprobs = found[: (len(prompt) - 1) * (num_top + 1)]
    assert len(inbox.of_kind(sequence, CqeKind.PROMPT_LOGPROB)) == len(prompt) - 1
    for i, entry in enumerate(logprobs):
        position, rank = 1 + i // (num_top + 1), i % (num_top + 1)
        before = prompt[position - 1]
        if rank < num_top:
            expected = (CqeKind.TOP_LOGPROB, rank, (before + rank) % VOCAB, -float(rank))
        else:
            expected = (CqeKind.PROMPT_LOGPROB, rank, prompt[position], -(position - 1) - before / 128)
        assert (entry["kind"], entry["rank"], entry["token"], entry["logprob"]) == expected
        assert entry["index"] == position


@pytest.mark.parametrize("num_top", [0, 3, 20])
@pytest.mark.parametrize("length", [1, 2, 31, 33, 63])
def test_each_prompt_token_is_scored_once_and_in_order(length: int, num_top: int) -> None:
    with running(small_config(max_num_batched_tokens=16)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), make_prompt(length)
        other = submit(h, pair, make_prompt(9), max_tokens=12)
        h.step()
        sequence = submit(h, pair, prompt, max_tokens=1, prompt_logprobs=num_top)
        run_until_finished(h, inbox, [pair], [sequence, other])
        check_prompt_logprobs(inbox, sequence, prompt, num_top)
        assert inbox.tokens(sequence) == expected_tokens(prompt, 1, VOCAB)
        assert inbox.tokens(other) == expected_tokens(make_prompt(9), 12, VOCAB)


def test_a_cached_prompt_is_computed_again_for_its_logprobs_only() -> None:
    with running(small_config()) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), make_prompt(40)
        for scored in (False, True, False):
            sequence = submit(h, pair, prompt, max_tokens=1, prompt_logprobs=1 if scored else None)
            run_until_finished(h, inbox, [pair], [sequence])
            assert bool(inbox.of_kind(sequence, CqeKind.PROMPT_LOGPROB)) == scored
            assert bool(inbox.cached(sequence)) == (sequence != min(inbox.completions) and not scored)


def step_unread(h: Harness, steps: int) -> int:
    before = h.num_launches
    for _ in range(steps):
        h.step()
    return h.num_launches - before


def test_prompt_logprobs_wait_for_a_frontend_that_does_not_read() -> None:
    with running(small_config(), cq_entries=128) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [make_prompt(60, salt) for salt in range(4)]
        sequences = [submit(h, pair, prompt, max_tokens=2, prompt_logprobs=7) for prompt in prompts]
        assert step_unread(h, 40) < 20, "it went on without room"
        run_until_finished(h, inbox, [pair], sequences)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            check_prompt_logprobs(inbox, sequence, prompt, 7)
            assert inbox.tokens(sequence) == expected_tokens(prompt, 2, VOCAB)


def test_what_is_recomputed_is_not_scored_again() -> None:
    with running(small_config(), num_blocks=14) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [make_prompt(20, salt) for salt in range(4)]
        sequences = [submit(h, pair, prompt, max_tokens=40, prompt_logprobs=2) for prompt in prompts]
        run_until_finished(h, inbox, [pair], sequences)
        assert h.statistic("num_preemptions") > 0
        for sequence, prompt in zip(sequences, prompts, strict=True):
            check_prompt_logprobs(inbox, sequence, prompt, 2)
            assert inbox.tokens(sequence) == expected_tokens(prompt, 40, VOCAB)


def test_only_steps_that_score_run_a_scoring_graph() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        plain = submit(h, pair, make_prompt(30), max_tokens=4)
        run_until_finished(h, inbox, [pair], [plain])
        first = int(h.geometry["first_scoring_graph"])
        assert all(graph < first for graph in h.decision_log()["graph"])
        sequence = submit(h, pair, make_prompt(20, 1), max_tokens=4, prompt_logprobs=0)
        run_until_finished(h, inbox, [pair], [sequence])
        scoring, *decoding = h.decision_log()["graph"].tolist()[-4:]
        assert h.geometry["graphs"][scoring]["tokens"] == 32 and scoring >= first and decoding == [0, 0, 0]
