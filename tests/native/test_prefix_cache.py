# SPDX-License-Identifier: Apache-2.0
"""Reuse and eviction of the KV cache of equal prompt prefixes."""

from __future__ import annotations

import pytest

from blink.sampling_params import SamplingParams
from harness import (
    Harness,
    Inbox,
    QueuePair,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submission,
    submit,
)

VOCAB = 97


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


def cached_tokens(
    h: Harness, pair: QueuePair, prompt: list[int], salt: bytes = b"", *, hashes: bytes | None = None
) -> int:
    """Run a prompt to its end, check its tokens and return how many of the prompt's were found in a cache.

    hashes: of its blocks, where a frontend sends others than the prompt's.
    """
    inbox = Inbox()
    entry = submission(prompt, (), h.hashes(prompt, salt) if hashes is None else hashes)
    sequence = pair.submit(entry, SamplingParams(max_tokens=3))
    run_until_finished(h, inbox, [pair], [sequence])
    assert inbox.tokens(sequence) == expected_tokens(prompt, 3, VOCAB)
    cached = inbox.cached(sequence)
    assert cached is not None
    return cached


@pytest.mark.parametrize(("length", "found"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32)])
def test_an_equal_prompt_finds_all_its_full_blocks_but_leaves_one_token(length: int, found: int) -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        assert cached_tokens(h, pair, prompt_of(length)) == 0
        assert cached_tokens(h, pair, prompt_of(length)) == found


def test_a_shared_prefix_is_found_up_to_the_block_where_prompts_part() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(40))
        assert cached_tokens(h, pair, [*prompt_of(20), *prompt_of(20, 50)]) == 16
        assert cached_tokens(h, pair, [1, *prompt_of(40)[1:]]) == 0


def test_sequences_that_run_share_blocks_and_keep_them_after_one_ends() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        first = submit(h, pair, prompt_of(25), max_tokens=4)
        for _ in range(3):
            h.step()
        second = submit(h, pair, prompt_of(25), max_tokens=20)
        run_until_finished(h, inbox, [pair], [first, second])
        assert inbox.cached(second) == 24
        assert inbox.tokens(second) == expected_tokens(prompt_of(25), 20, VOCAB)


def test_another_salt_finds_nothing() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(40), b"one")
        assert cached_tokens(h, pair, prompt_of(40), b"two") == 0
        assert cached_tokens(h, pair, prompt_of(40), b"one") == 32


def test_nothing_is_found_when_the_cache_is_off() -> None:
    with running(small_config(enable_prefix_caching=False)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(40))
        assert cached_tokens(h, pair, prompt_of(40)) == 0


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    # Three prompts leave 4 cached blocks each; the fourth prompt needs 4 more of the 16, and a launch keeps 1 free.
    with running(small_config(max_num_seqs=1), num_blocks=16) as h:
        pair = h.frontend()
        prompts = [prompt_of(33, start) for start in (0, 30, 60)]
        for prompt in prompts:
            cached_tokens(h, pair, prompt)
        assert cached_tokens(h, pair, prompts[0]) == 32  # used again: the second is now the oldest
        cached_tokens(h, pair, prompt_of(24, 90))
        assert cached_tokens(h, pair, prompts[0]) == 32
        assert cached_tokens(h, pair, prompts[2]) == 32
        assert cached_tokens(h, pair, prompts[1]) < 32


def test_the_end_of_a_prompt_is_evicted_before_its_start() -> None:
    with running(small_config(max_num_seqs=1), num_blocks=8) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(57))  # 7 blocks stay cached
        cached_tokens(h, pair, prompt_of(20, 50))
        found = cached_tokens(h, pair, prompt_of(57))
        assert 0 < found < 56


def test_evicted_blocks_are_counted_and_the_counters_add_up() -> None:
    with running(small_config(max_num_seqs=1), num_blocks=8) as h:
        pair = h.frontend()
        found = [cached_tokens(h, pair, prompt_of(40, start)) for start in (0, 0, 30, 0)]
        h.step()
        assert h.statistic("evicted_blocks") > 0
        assert h.statistic("prefix_queries") == 160 and h.statistic("prefix_hits") == sum(found)
        assert h.statistic("num_blocks_used") == 0
        assert h.statistic("num_blocks_cached") <= 8


def test_repeated_hashes_of_a_faulty_frontend_do_not_corrupt_the_cache() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        cached_tokens(h, pair, [3] * 8 + [4])
        block = h.hashes([3] * 8)
        liar = pair.submit(submission([3] * 33, (), block * 4), SamplingParams(max_tokens=3))
        run_until_finished(h, inbox, [pair], [liar])
        assert inbox.cached(liar) == 8 and inbox.tokens(liar) == expected_tokens([3] * 33, 3, VOCAB)
        h.step()
        assert h.statistic("num_blocks_used") == 0


PROMPT = prompt_of(33)
OTHER = prompt_of(33, 50)
FORGERIES = {
    "all tokens are others": (OTHER, slice(0, 4)),
    "the middle is another": (PROMPT[:8] + OTHER[8:16] + PROMPT[16:], slice(0, 4)),
    "the start is another": (OTHER[:8] + PROMPT[8:], slice(0, 4)),
    "equal blocks behind another start": (OTHER[:8] + PROMPT[8:], slice(1, 4)),
    "equal blocks at another place": (PROMPT[8:16] + PROMPT[:8] + OTHER[16:], slice(1, 4)),
}


@pytest.mark.parametrize("honest_first", [False, True])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_tokens_under_the_hashes_of_a_foreign_prompt_cost_its_owner_cache_hits_at_most(
    forgery: str, honest_first: bool
) -> None:
    prompt, forged = FORGERIES[forgery]
    with running(small_config(), num_blocks=24) as h:
        hostile, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        if honest_first:
            cached_tokens(h, pair, PROMPT[:17])
        hashes = [h.hashes(PROMPT)[i : i + 16] for i in range(0, 64, 16)]
        kept = range(*forged.indices(4))
        sent = b"".join(block if i in kept else bytes([i]) * 16 for i, block in enumerate(hashes))
        liar = hostile.submit(submission(prompt, (), sent), SamplingParams(max_tokens=3))
        run_until_finished(h, inbox, [hostile], [liar])
        assert inbox.tokens(liar) == expected_tokens(prompt, 3, VOCAB)
        cached_tokens(h, pair, PROMPT)  # checks what is generated
        assert cached_tokens(h, pair, PROMPT) == 32, "what was forged has given way"


def test_sequences_that_compute_equal_blocks_side_by_side_leave_one_chain() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        short, long = submit(h, pair, PROMPT[:9], max_tokens=2), submit(h, pair, PROMPT, max_tokens=2)
        run_until_finished(h, inbox, [pair], [short, long])
        assert inbox.cached(long) == 0, "they did not run side by side"
        assert cached_tokens(h, pair, PROMPT) == 32
