# SPDX-License-Identifier: Apache-2.0
"""What a sequence delivers and why it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink.link import queue_pair
from blink.link.queue_pair import Submission
from blink.region.layout import SAMPLING, SLOT_PARAMS, CqeKind, FinishReason, StepResult
from blink.sampling_params import SamplingParams
from harness import Inbox, expected_tokens, run_until_finished, running, small_config, submit

VOCAB = 97
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_max_tokens_ends_a_sequence_by_length() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, PROMPT, max_tokens=count) for count in (1, 2, 17)]
        run_until_finished(h, inbox, [pair], sequences)
        for sequence, count in zip(sequences, (1, 2, 17), strict=True):
            assert inbox.tokens(sequence) == expected_tokens(PROMPT, count, VOCAB)
            assert inbox.finish(sequence) == FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 62, 63])
def test_the_context_end_ends_a_sequence_by_length(length: int) -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        prompt = [i % VOCAB for i in range(length)]
        sequence = submit(h, pair, prompt, max_tokens=1000)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == expected_tokens(prompt, 64 - length, VOCAB)
        assert inbox.finish(sequence) == FinishReason.LENGTH


@pytest.mark.parametrize("num_stops", [1, 8, 9, 128])
def test_a_stop_token_ends_a_sequence_wherever_it_stands_in_the_list(num_stops: int) -> None:
    answer = expected_tokens(PROMPT, 40, VOCAB)
    at = next(i for i, token in enumerate(answer) if i > 4 and token not in answer[:i])
    others = [token for token in range(VOCAB) if token not in answer]
    stops = (*tuple((others * 4)[: num_stops - 1]), answer[at])
    assert len(stops) == num_stops
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, stop_tokens=stops, max_tokens=40)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == answer[: at + 1]
        assert inbox.finish(sequence) == FinishReason.STOP


def test_min_tokens_ignores_stop_tokens_until_then() -> None:
    answer = expected_tokens(PROMPT, 30, VOCAB)
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        stops = (answer[2], answer[9])
        sequence = submit(h, pair, PROMPT, stop_tokens=stops, max_tokens=30, min_tokens=5)
        run_until_finished(h, inbox, [pair], [sequence])
        end = next(i for i, token in enumerate(answer) if i >= 5 and token in stops)
        assert inbox.tokens(sequence) == answer[: end + 1]


@pytest.mark.parametrize("logprobs", [0, 1, 20])
def test_top_logprobs_come_before_their_token(logprobs: int) -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, max_tokens=3, logprobs=logprobs)
        run_until_finished(h, inbox, [pair], [sequence])
        kinds = [CqeKind(int(c["kind"])) for c in inbox.completions[sequence]]
        assert kinds == [CqeKind.ADMITTED, *([CqeKind.TOP_LOGPROB] * logprobs + [CqeKind.TOKEN]) * 3]
        tops = inbox.of_kind(sequence, CqeKind.TOP_LOGPROB)
        assert [int(c["rank"]) for c in tops] == list(range(logprobs)) * 3
        for top, token in zip(tops, (token for token in inbox.tokens(sequence) for _ in range(logprobs)), strict=True):
            assert int(top["token"]) == (token + int(top["rank"])) % VOCAB and top["logprob"] == -float(top["rank"])


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_a_cancelled_sequence_ends_once_and_frees_what_it_held(when: str) -> None:
    with running(small_config(max_num_seqs=1)) as h:
        pair, inbox = h.frontend(), Inbox()
        first = submit(h, pair, PROMPT, max_tokens=40)
        second = submit(h, pair, PROMPT, max_tokens=40)
        victim, other = (second, first) if when == "waiting" else (first, second)
        for _ in range(3):
            h.step()
        if when == "in flight":
            h.step(finish=False)
            pair.cancel(victim)
            assert h.step(finish=False) == StepResult.BUSY
            h.finish()
        else:
            pair.cancel(victim)
        run_until_finished(h, inbox, [pair], [victim])
        delivered = inbox.tokens(victim)
        assert delivered == expected_tokens(PROMPT, 40, VOCAB)[: len(delivered)] and len(delivered) < 10
        assert inbox.completions[victim][-1]["kind"] == CqeKind.FINISHED
        assert inbox.finish(victim) == FinishReason.ABORT
        run_until_finished(h, inbox, [pair], [other])
        assert inbox.tokens(other) == expected_tokens(PROMPT, 40, VOCAB)
        h.step()
        assert h.statistic("finished_abort") == 1 and h.statistic("num_blocks_used") == 0


@pytest.mark.parametrize("logprobs", [None, 3])
def test_a_sequence_starts_only_where_its_admission_and_a_token_have_room(logprobs: int | None) -> None:
    """Of sixteen completions all but those of one token are unread: with its admission they are one too few."""
    room = 1 + (logprobs or 0)
    with running(small_config(), cq_entries=16) as h:
        pair, inbox = h.frontend(), Inbox()
        first = submit(h, pair, PROMPT, max_tokens=15 - room)
        while h.step() == StepResult.LAUNCHED:
            pair.renew_lease()
        late, tail = submit(h, pair, PROMPT, max_tokens=3, logprobs=logprobs), int(h.queue_pairs["cq_tail"][0])
        for _ in range(3):
            h.step()
        assert int(h.queue_pairs["cq_tail"][0]) == tail
        run_until_finished(h, inbox, [pair], [first, late])
        assert inbox.tokens(first) == expected_tokens(PROMPT, 15 - room, VOCAB)
        assert inbox.tokens(late) == expected_tokens(PROMPT, 3, VOCAB)


def test_a_parked_sequence_that_cannot_start_gives_its_blocks_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes first and keeps six of the eight blocks; its frontend has read one completion, which is not enough."""
    with running(small_config(max_num_seqs=1, scheduling_policy="priority"), num_blocks=8, cq_entries=16) as h:
        silent, reader, late, inbox = h.frontend(0), h.frontend(1), Inbox(), Inbox()
        long = submit(h, silent, PROMPT * 3, max_tokens=30, cached=False)
        while h.step() == StepResult.LAUNCHED:
            silent.renew_lease()
        other = submit(h, reader, PROMPT, max_tokens=30, cached=False, priority=5)
        while not inbox.tokens(other):
            silent.renew_lease()
            h.step()
            inbox.drain(reader)
        assert h.statistic("num_parked") == 1
        with monkeypatch.context() as patch:
            patch.setattr(queue_pair, "_DRAIN_BATCH", 1)
            late.drain(silent)
        for _ in range(80):
            silent.renew_lease()
            h.step()
            inbox.drain(reader)
        assert inbox.tokens(other) == expected_tokens(PROMPT, 30, VOCAB)
        run_until_finished(h, late, [silent], [long])
        assert late.tokens(long) == expected_tokens(PROMPT * 3, 30, VOCAB)


@pytest.mark.parametrize("times", [2, 5])
def test_a_sequence_that_is_cancelled_more_than_once_ends_once(times: int) -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        victim, other = (submit(h, pair, PROMPT, max_tokens=20) for _ in range(2))
        h.step()
        for _ in range(times):
            pair.cancel(victim)
        run_until_finished(h, inbox, [pair], [victim, other])
        assert inbox.finish(victim) == FinishReason.ABORT and int(h.scheduler["num_cancels"]) == 0
        assert inbox.tokens(other) == expected_tokens(PROMPT, 20, VOCAB)


@pytest.mark.parametrize("why", ["it is cancelled", "its frontend has gone"])
def test_what_is_sampled_of_a_sequence_that_nobody_waits_for_is_not_delivered(why: str) -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, max_tokens=40)
        for _ in range(4):
            h.step()
        inbox.drain(pair)
        h.step(finish=False)
        inbox.drain(pair)
        before, generated = inbox.tokens(sequence), h.statistic("generation_tokens")
        if why == "it is cancelled":
            pair.cancel(sequence)
        else:
            h.attach_later(0)
        tail = int(h.queue_pairs["cq_tail"][0])
        assert h.step(finish=False) == StepResult.BUSY
        h.finish()
        h.step()
        h.step()
        assert h.statistic("generation_tokens") == generated
        if why == "it is cancelled":
            inbox.drain(pair)
            assert inbox.tokens(sequence) == before and inbox.finish(sequence) == FinishReason.ABORT
        else:
            assert int(h.queue_pairs["cq_tail"][0]) == tail and h.scheduler["num_live"] == 0


@pytest.mark.parametrize("when", ["first token", "later"])
def test_a_row_without_a_token_ends_its_sequence_alone_with_an_error(when: str) -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, [*PROMPT, i], max_tokens=20, logprobs=2) for i in range(3)]
        delivered = 0 if when == "first token" else 4
        while int(h.sequences[1]["num_generated"]) < delivered or int(h.batch[0]["num_rows"]) < 3:
            h.step(finish=False)
            if int(h.sequences[1]["num_generated"]) < delivered:
                h.finish()
        row = next(row for row, (index, _) in enumerate(h.batch_rows()) if index == 1)
        h.step_array("sampled_tokens", "i4")[row] = -1
        h.finish()
        run_until_finished(h, inbox, [pair], sequences)
        assert [inbox.finish(s) for s in sequences] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
        assert inbox.tokens(sequences[1]) == expected_tokens([*PROMPT, 1], delivered, VOCAB)
        for i in (0, 2):
            assert inbox.tokens(sequences[i]) == expected_tokens([*PROMPT, i], 20, VOCAB)
        assert pair.num_live == 0
        h.step()
        assert h.statistic("finished_error") == 1 and h.statistic("num_blocks_used") == 0


def test_a_cancellation_that_comes_too_late_is_not_seen_by_the_caller() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, max_tokens=1)
        for _ in range(4):
            h.step()
        pair.cancel(sequence)  # ended, but not drained yet
        again = submit(h, pair, PROMPT, max_tokens=2)
        run_until_finished(h, inbox, [pair], [sequence, again])
        assert [inbox.finish(s) for s in (sequence, again)] == [FinishReason.LENGTH] * 2
        h.step()
        assert h.statistic("num_rejected") == 1


def test_sampling_parameters_reach_the_slot_unchanged() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.75,
        "top_k": 7,
        "min_tokens": 2,
        "reasoning_limit": 9,
        "reasoning_open": 3,
        "reasoning_close": 4,
    }
    expected = {**same, "num_logprobs": 3, "named_logprobs": 0, "num_prompt_logprobs": 3}
    expected |= {"seed_low": 9, "seed_high": 1 << 31}
    assert expected.keys() == set(SAMPLING.names or ()), "a parameter that this test does not know"
    with running(small_config()) as h:
        request = Submission(np.asarray(PROMPT, np.int32), (5, 6), 9 | 1 << 63, b"")
        h.frontend().submit(
            request, SamplingParams(**same, logprobs=3, prompt_logprobs=2, logit_bias={11: -2.5, 12: 3.0})
        )
        h.step()
        h.step()
        slot = int(h.sequences[0]["slot"])
        params = h.state.array("params", SLOT_PARAMS)[slot]
        assert {name: params["sampling"][name] for name in expected} == expected
        assert (params["num_prompt_tokens"], params["num_stop_tokens"], params["num_biases"]) == (len(PROMPT), 2, 2)
        assert h.state.array("bias_tokens", "i4").reshape(len(h.tokens), -1)[slot, :2].tolist() == [11, 12]
        assert h.state.array("bias_values", "f4").reshape(len(h.tokens), -1)[slot, :2].tolist() == [-2.5, 3.0]
        assert h.state.array("stop_tokens", "i4").reshape(len(h.tokens), -1)[slot, :2].tolist() == [5, 6]
