# SPDX-License-Identifier: Apache-2.0
"""The blocks of answers in the prefix cache: a conversation's next turn finds them; and how the cache is emptied."""

from __future__ import annotations

import pytest

from blink.link.queue_pair import NO_HASH_ROOT
from blink.region.layout import Opcode, StepResult
from blink.sampling_params import SamplingParams
from harness import Harness, Inbox, QueuePair, expected_tokens, run_until_finished, running, small_config, submission

VOCAB = 97
NEW = [5, 6, 7]  # what a user adds to an answer


def ask(
    h: Harness, pair: QueuePair, prompt: list[int], count: int, *, salt: bytes = b"", cached: bool = True
) -> tuple[list[int], int]:
    """Run a prompt, check its answer and return it with the number of prompt tokens found in the cache."""
    inbox, root = Inbox(), h.hash_root(salt) if cached else NO_HASH_ROOT
    entry = submission(prompt, (), h.hashes(prompt, salt), 0, root)
    sequence = pair.submit(entry, SamplingParams(max_tokens=count))
    run_until_finished(h, inbox, [pair], [sequence])
    assert inbox.tokens(sequence) == expected_tokens(prompt, count, VOCAB)
    found = inbox.cached(sequence)
    assert found is not None
    return inbox.tokens(sequence), found


# The last token of an answer is never computed, so 3 + 22 tokens are three whole blocks of 8 only with one more.
@pytest.mark.parametrize(("length", "count", "found"), [(3, 21, 16), (3, 22, 24), (8, 17, 24), (20, 13, 32), (5, 3, 0)])
def test_the_next_turn_finds_the_full_blocks_of_prompt_and_answer(length: int, count: int, found: int) -> None:
    with running(small_config()) as h:
        pair, prompt = h.frontend(), list(range(length))
        answer, _ = ask(h, pair, prompt, count)
        assert ask(h, pair, prompt + answer + NEW, 3)[1] == found


def test_ten_turns_compute_each_token_once_but_for_the_last_block() -> None:
    with running(small_config(), max_model_len=256, num_blocks=64) as h:
        pair, history = h.frontend(), [1, 2]
        for _ in range(10):
            answer, found = ask(h, pair, history, 15)
            assert found >= len(history) - len(NEW) - 8
            history += answer + NEW


def test_answers_are_cached_only_with_a_root_and_under_their_own_salt() -> None:
    with running(small_config()) as h:
        pair, prompt = h.frontend(), list(range(8))
        answer, _ = ask(h, pair, prompt, 20, cached=False)
        assert ask(h, pair, prompt + answer + NEW, 3, cached=False)[1] == 8  # the prompt alone
        ask(h, pair, prompt, 20, salt=b"tenant")
        assert ask(h, pair, prompt + answer + [9], 3)[1] == 24  # what the second turn left
        assert ask(h, pair, prompt + answer + [10], 3, salt=b"other")[1] == 0
        assert ask(h, pair, prompt + answer + [11], 3, salt=b"tenant")[1] == 24


def test_a_preempted_sequence_finds_what_it_had_generated() -> None:
    # Two answers of 30 tokens need 10 blocks of 9: one makes way, and takes the blocks that were not taken back.
    with running(small_config(max_num_seqs=2), num_blocks=9) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [[1, 2, 3], [4, 5, 6]]
        entries = [submission(prompt, (), h.hashes(prompt), 0, h.hash_root()) for prompt in prompts]
        sequences = [pair.submit(entry, SamplingParams(max_tokens=36)) for entry in entries]
        run_until_finished(h, inbox, [pair], sequences)
        assert h.statistic("num_preemptions") > 0
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert inbox.tokens(sequence) == expected_tokens(prompt, 36, VOCAB)
        recomputed = h.statistic("computed_tokens") - sum(len(p) + 35 for p in prompts)
        assert recomputed < 36, "the preempted one began from nothing"


def test_a_reset_empties_the_cache_and_leaves_what_runs() -> None:
    with running(small_config()) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), list(range(33))
        ask(h, pair, prompt, 3)
        long = pair.submit(submission(prompt, (), h.hashes(prompt), 0, h.hash_root()), SamplingParams(max_tokens=25))
        for _ in range(4):
            h.step()
            inbox.drain(pair)
        pair.order(Opcode.RESET_PREFIX_CACHE)
        run_until_finished(h, inbox, [pair], [long])
        assert h.statistic("prefix_resets") == 1
        assert inbox.cached(long) == 32 and inbox.tokens(long) == expected_tokens(prompt, 25, VOCAB)
        assert ask(h, pair, prompt, 3)[1] == 0
        assert ask(h, pair, prompt, 3)[1] == 32


def test_a_reset_of_an_idle_engine_frees_every_block() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        ask(h, pair, list(range(40)), 3)
        assert h.statistic("num_blocks_cached") > 0
        pair.order(Opcode.RESET_PREFIX_CACHE)
        assert h.step() == StepResult.IDLE
        assert (h.statistic("prefix_resets"), h.statistic("num_blocks_cached")) == (1, 0)
        assert h.statistic("num_blocks_used") == 0


def test_hits_and_sequences_are_counted_by_class() -> None:
    with running(small_config(max_num_seqs=1)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), list(range(17))
        entry = submission(prompt, (), h.hashes(prompt))
        classes = [False, True, True]
        sequences = [pair.submit(entry, SamplingParams(max_tokens=4, best_effort=best)) for best in classes]
        h.step()
        names = ("num_running", "num_running_best_effort", "num_waiting", "num_waiting_best_effort")
        assert [h.statistic(name) for name in names] == [1, 0, 2, 2]
        run_until_finished(h, inbox, [pair], sequences)
        names = ("prefix_queries", "best_effort_prefix_queries", "prefix_hits", "best_effort_prefix_hits")
        assert [h.statistic(name) for name in names] == [51, 34, 32, 32]


def test_the_time_of_steps_and_between_them_adds_up() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        ask(h, pair, list(range(10)), 5)  # each pass is a millisecond; a step ends with the next
        h.step()
        assert h.statistic("num_steps") == 5
        assert h.statistic("running_ns") == 5_000_000
        entries = h.region.trace()[1:6]
        assert (entries["ended_ns"] - entries["launched_ns"] == 1_000_000).all()
