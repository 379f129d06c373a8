# SPDX-License-Identifier: Apache-2.0
"""Blocks of the prefix cache in host memory: kept when they are evicted, restored when a prompt needs them.

The harness makes the copies, and each row must find all of its tokens in the KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from blink.region.layout import FinishReason, Opcode
from harness import (
    Harness,
    Inbox,
    QueuePair,
    Step,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submit,
    with_host,
)
from random_load import play_episodes
from test_prefix_cache import VOCAB, cached_tokens, prompt_of


def fill(h: Harness, pair: QueuePair) -> None:
    """Let other prompts take all of the KV cache."""
    for start in range(40, 44):
        cached_tokens(h, pair, prompt_of(60, start))


def test_an_evicted_prefix_is_restored() -> None:
    with running(small_config(), num_blocks=16, **with_host(64)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        fill(h, pair)
        computed = h.statistic("computed_tokens")
        assert cached_tokens(h, pair, prompt_of(60)) == 56
        assert h.statistic("host_hits") == 56
        assert h.statistic("computed_tokens") - computed == 4 + 2, "only what no cache held is computed"


def test_a_prefix_that_is_partly_in_the_kv_cache_is_completed_from_the_host() -> None:
    with running(small_config(), num_blocks=16, **with_host(64)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        cached_tokens(h, pair, prompt_of(60, 40))
        hits = h.statistic("prefix_hits")
        assert cached_tokens(h, pair, prompt_of(60)) == 56
        from_cache = h.statistic("prefix_hits") - hits
        assert 0 < from_cache < 56 and from_cache + h.statistic("host_hits") == 56


def test_without_host_blocks_an_evicted_prefix_is_computed_again() -> None:
    with running(small_config(), num_blocks=16) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        fill(h, pair)
        assert cached_tokens(h, pair, prompt_of(60)) == 0


def test_blocks_that_follow_a_restored_one_are_still_found() -> None:
    """Evicted one by one, some are restored, evicted and restored again: all keep their chain."""
    with running(small_config(), num_blocks=16, **with_host(64)) as h:
        pair = h.frontend()
        for _ in range(4):
            assert cached_tokens(h, pair, prompt_of(30)) in (0, 24)
            assert cached_tokens(h, pair, prompt_of(60)) in (24, 56)
            fill(h, pair)
        assert cached_tokens(h, pair, prompt_of(60)) == 56


def test_a_reset_empties_the_host_too() -> None:
    with running(small_config(), num_blocks=16, **with_host(64)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        fill(h, pair)
        assert h.statistic("num_host_blocks_used") > 0
        pair.order(Opcode.RESET_PREFIX_CACHE)
        h.step()
        assert h.statistic("num_host_blocks_used") == 0
        assert cached_tokens(h, pair, prompt_of(60)) == 0


def test_the_host_forgets_what_was_not_used_for_long() -> None:
    with running(small_config(), num_blocks=16, **with_host(8)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        fill(h, pair)
        assert h.statistic("num_host_blocks_used") == 8
        assert cached_tokens(h, pair, prompt_of(60)) < 56


def test_forged_hashes_restore_nothing_of_others() -> None:
    with running(small_config(), num_blocks=16, **with_host(64)) as h:
        pair, prompt, other = h.frontend(), prompt_of(60), prompt_of(60, 7)
        cached_tokens(h, pair, prompt)
        fill(h, pair)
        assert cached_tokens(h, pair, other, hashes=h.hashes(prompt)) == 0, "equal hashes, other tokens"
        fill(h, pair)
        mixed = [*other[:8], *prompt[8:]]
        assert cached_tokens(h, pair, mixed, hashes=h.hashes(mixed)[:16] + h.hashes(prompt)[16:]) <= 8, "another start"
        fill(h, pair)
        assert cached_tokens(h, pair, prompt) in (0, 56)
        assert cached_tokens(h, pair, other) in (0, 8, 56)


def test_a_restored_sequence_does_not_hold_others() -> None:
    """While others decode, each step restores a part, and they get a token in every step."""
    with running(small_config(block_size=8), num_blocks=150, max_model_len=720, **with_host(400)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(700)
        cached_tokens(h, pair, prompt)
        for start in range(30, 33):
            cached_tokens(h, pair, prompt_of(690, start))
        decoder = submit(h, pair, prompt_of(5, 3), max_tokens=60)
        h.step()
        inbox.drain(pair)
        restored = submit(h, pair, prompt, max_tokens=1)
        steps, hits = 0, h.statistic("host_hits")
        while inbox.finish(restored) is None:
            before = len(inbox.tokens(decoder))
            h.step()
            inbox.drain(pair)
            assert len(inbox.tokens(decoder)) == before + 1 and h.statistic("host_hits") - hits <= 32 * 8
            hits, steps = h.statistic("host_hits"), steps + 1
        assert 3 <= steps <= 6, "three steps restore 87 blocks"
        assert inbox.cached(restored) == 696
        assert inbox.tokens(restored) == expected_tokens(prompt, 1, VOCAB)


@pytest.mark.parametrize("steps", range(5))
def test_a_sequence_may_be_cancelled_while_it_is_restored(steps: int) -> None:
    with running(small_config(), num_blocks=150, max_model_len=720, **with_host(400)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(700)
        cached_tokens(h, pair, prompt)
        for start in range(30, 33):
            cached_tokens(h, pair, prompt_of(690, start))
        submit(h, pair, prompt_of(5, 3), max_tokens=60)
        restored = submit(h, pair, prompt, max_tokens=20)
        for _ in range(steps):
            h.step(finish=False)
            h.finish()
        pair.cancel(restored)
        run_until_finished(h, inbox, [pair], [restored])
        assert inbox.finish(restored) == FinishReason.ABORT
        assert cached_tokens(h, pair, prompt) == 696


def size_host(seed: int) -> dict[str, int]:
    script = random.Random(seed)
    return with_host(script.choice((3, 10, 60, 200)), script.choice((16, 64, 256)))


def test_random_load_reads_its_own_tokens_from_a_cache_that_is_too_small() -> None:
    counts = play_episodes(range(12), size_host)
    assert counts["host_hits"] > 0 and counts["host_blocks_stored"] > counts["host_hits"] // 16


@pytest.mark.long
def test_much_random_load_reads_its_own_tokens() -> None:
    play_episodes(range(100, 500), size_host)


@pytest.mark.parametrize(("lanes", "seeds"), [(3, 2), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (3, 8))])
def test_any_number_of_lanes_restores_the_same(lanes: int, seeds: int, lane_steps: Callable[[int], Step]) -> None:
    assert play_episodes(range(seeds), size_host, lane_steps(lanes)) == play_episodes(range(seeds), size_host)
