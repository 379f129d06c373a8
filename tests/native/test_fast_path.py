# SPDX-License-Identifier: Apache-2.0
"""The fast path, on which decoding continues: taken when nothing is to be decided, and never else."""

from __future__ import annotations

from typing import Any

import pytest

from blink.region.layout import FinishReason
from harness import Harness, Inbox, QueuePair, expected_tokens, run_until_finished, running, small_config, submit

VOCAB = 97
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9])


def fast_steps(h: Harness) -> int:
    return int(h.scheduler["num_fast_steps"])


def decode(h: Harness, pair: QueuePair, inbox: Inbox, steps: int) -> None:
    """Step a few times, and see that no step leaves the fast path."""
    for _ in range(steps):
        before = fast_steps(h)
        inbox.drain(pair)
        h.step()
        assert fast_steps(h) == before + 1


def start(h: Harness, logprobs: int | None = None) -> tuple[QueuePair, Inbox, list[int]]:
    """Let three sequences decode."""
    pair, inbox = h.frontend(), Inbox()
    sequences = [submit(h, pair, prompt, max_tokens=40, logprobs=logprobs) for prompt in PROMPTS]
    for _ in range(3):
        inbox.drain(pair)
        h.step()
    return pair, inbox, sequences


def assert_answers(h: Harness, inbox: Inbox, pair: QueuePair, sequences: list[int]) -> None:
    run_until_finished(h, inbox, [pair], sequences)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert inbox.tokens(sequence) == expected_tokens(prompt, 40, VOCAB)
        assert inbox.finish(sequence) == FinishReason.LENGTH


def test_decoding_rows_go_on_by_the_fast_path_and_over_the_ends_of_blocks() -> None:
    with running(small_config()) as h:
        pair, inbox, sequences = start(h)
        decode(h, pair, inbox, 36)
        assert_answers(h, inbox, pair, sequences)
        assert h.scheduler["num_free_blocks"] + h.scheduler["num_evictable"] == h.geometry["num_blocks"]


def test_an_arrival_joins_the_step_behind_the_one_in_flight() -> None:
    with running(small_config()) as h:
        pair, inbox, sequences = start(h)
        decode(h, pair, inbox, 5)
        h.step(finish=False)
        late, before = submit(h, pair, [7, 7, 7], max_tokens=4), fast_steps(h)
        h.step()  # sees it, while the step in flight runs
        h.step()
        assert fast_steps(h) == before and len(h.batch_rows()) == 4
        run_until_finished(h, inbox, [pair], [late])
        assert inbox.tokens(late) == expected_tokens([7, 7, 7], 4, VOCAB)
        assert_answers(h, inbox, pair, sequences)


def test_a_cancel_takes_its_row_out_of_the_next_step() -> None:
    with running(small_config()) as h:
        pair, inbox, sequences = start(h)
        decode(h, pair, inbox, 5)
        h.step(finish=False)
        pair.cancel(sequences[0])
        before = fast_steps(h)
        h.step()
        h.step()
        assert fast_steps(h) == before and len(h.batch_rows()) == 2
        run_until_finished(h, inbox, [pair], sequences)
        assert inbox.finish(sequences[0]) == FinishReason.ABORT
        assert inbox.tokens(sequences[1]) == expected_tokens(PROMPTS[1], 40, VOCAB)


def test_a_stop_token_ends_its_row_in_time() -> None:
    answer = expected_tokens(PROMPTS[0], 40, VOCAB)
    at = next(i for i, token in enumerate(answer) if i > 8 and token not in answer[:i])
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        stopped = submit(h, pair, PROMPTS[0], max_tokens=40, stop_tokens=(VOCAB - 1 - answer[at], answer[at]))
        other = submit(h, pair, PROMPTS[1], max_tokens=40)
        run_until_finished(h, inbox, [pair], [stopped, other])
        assert fast_steps(h) > 20
        assert inbox.tokens(stopped) == answer[: at + 1] and inbox.finish(stopped) == FinishReason.STOP
        assert inbox.tokens(other) == expected_tokens(PROMPTS[1], 40, VOCAB)


@pytest.mark.parametrize("place", range(8))
def test_each_of_eight_stop_tokens_ends_its_row_in_time(place: int) -> None:
    answer = expected_tokens(PROMPTS[0], 40, VOCAB)
    at = next(i for i, token in enumerate(answer) if i > 8 and token not in answer[:i])
    stops = [token for token in range(VOCAB) if token not in answer][:8]
    stops[place] = answer[at]
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        stopped = submit(h, pair, PROMPTS[0], max_tokens=40, stop_tokens=tuple(stops))
        run_until_finished(h, inbox, [pair], [stopped])
        assert inbox.tokens(stopped) == answer[: at + 1] and inbox.finish(stopped) == FinishReason.STOP
        assert fast_steps(h) == at - 1, "all steps but those of its prompt, of its first token and of its last"


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 6])
def test_a_stop_token_ends_a_row_no_sooner_than_behind_its_least_tokens(min_tokens: int, logprobs: int | None) -> None:
    """With and without the fast path, which rows with logprobs never take."""
    answer = expected_tokens(PROMPTS[0], 12, VOCAB)
    assert len(set(answer[:8])) == 8
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        options: dict[str, Any] = {"max_tokens": 12, "min_tokens": min_tokens, "logprobs": logprobs}
        early = submit(h, pair, PROMPTS[0], stop_tokens=(answer[max(min_tokens - 1, 0)], answer[7]), **options)
        in_time = submit(h, pair, PROMPTS[0], stop_tokens=(answer[min_tokens],), **options)
        run_until_finished(h, inbox, [pair], [early, in_time])
        assert inbox.tokens(early) == answer[: 8 if min_tokens else 1]
        assert inbox.tokens(in_time) == answer[: min_tokens + 1]


def test_top_logprobs_are_delivered_before_a_step_could_overwrite_them() -> None:
    with running(small_config()) as h:
        pair, inbox, sequences = start(h, logprobs=2)
        assert_answers(h, inbox, pair, sequences)
        assert fast_steps(h) == 0


def test_a_full_queue_stops_the_rows_and_loses_nothing() -> None:
    with running(small_config(), cq_entries=32) as h:
        pair, inbox, sequences = start(h)
        for _ in range(20):
            pair.renew_lease()
            h.step()  # nobody reads
        assert 4 < fast_steps(h) < 11
        assert_answers(h, inbox, pair, sequences)


def test_a_shortage_of_blocks_is_left_to_the_planner() -> None:
    with running(small_config(), num_blocks=10) as h:
        pair, inbox, sequences = start(h)
        assert_answers(h, inbox, pair, sequences)
        assert fast_steps(h) > 10 and h.statistic("num_preemptions") > 0


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_what_is_no_token_does_not_go_on(token: int) -> None:
    with running(small_config()) as h:
        pair, inbox, sequences = start(h)
        decode(h, pair, inbox, 3)
        h.step_array("sampled_tokens", "i4")[1] = token
        before = fast_steps(h)
        h.step()
        assert fast_steps(h) == before
        inbox.drain(pair)
        assert (inbox.finish(sequences[1]) == FinishReason.ERROR) == (token == -1)
        assert (h.error_code != 0) == (token == VOCAB)
