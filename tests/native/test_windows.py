# SPDX-License-Identifier: Apache-2.0
"""Layers whose queries see a window: their blocks are freed behind it, and prefixes are found as far as it is there.

The harness plays these layers: each query must find the tokens of its window in window blocks, and what is free is
spoiled.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from blink.region.layout import Opcode
from blink.sampling_params import SamplingParams
from harness import (
    Harness,
    Inbox,
    Step,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submission,
    submit,
    with_windows,
)
from random_load import USUAL_EVENTS, play_episodes
from test_prefix_cache import VOCAB, cached_tokens, prompt_of
from window_cache import ROLLBACK, WindowCache, draw_prompts

SEEDS = 12


def freed_behind(position: int, window: int, size: int = 8) -> int:
    return max(position - window + 1, 0) // size


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 23])
def test_blocks_are_freed_as_soon_as_no_query_sees_them_and_not_before(window: int) -> None:
    """Tokens that may be taken back count as not computed."""
    with running(small_config(max_num_seqs=1), max_model_len=128, **with_windows(window, 40)) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, prompt_of(70), max_tokens=50)
        seen = set[int]()
        while inbox.finish(sequence) is None:
            h.step()
            inbox.drain(pair)
            [one] = [q for q in h.sequences if q["status"] != 0] or [None]
            if one is None or h.scheduler["in_flight"] == 0:
                continue
            computed = int(one["num_computed"] + one["row"]["num_tokens"])
            assert int(one["num_freed"]) == freed_behind(computed - ROLLBACK, window), computed
            held = int(one["num_blocks"] - one["num_freed"])
            kept = int(h.scheduler["num_free_window_blocks"] + h.scheduler["num_evictable_window_blocks"])
            assert kept == 40 - held
            seen.add(int(one["num_freed"]))
        assert inbox.tokens(sequence) == expected_tokens(prompt_of(70), 50, VOCAB)
        assert max(seen) == freed_behind(119 - ROLLBACK, window)
        assert len(seen) > 6  # and on most of the way


def test_a_sequence_longer_than_all_window_blocks_runs() -> None:
    # It takes those of its window, of 32 tokens of a step and of 16 that may be taken back.
    with running(small_config(), max_model_len=256, **with_windows(9, 8)) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, prompt_of(200), max_tokens=50)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == expected_tokens(prompt_of(200), 50, VOCAB)


def test_several_sequences_share_few_window_blocks() -> None:
    with running(small_config(), max_model_len=128, num_blocks=64, **with_windows(20, 18)) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [prompt_of(60, start) for start in (0, 20, 40, 60)]
        sequences = [submit(h, pair, prompt, max_tokens=60) for prompt in prompts]
        run_until_finished(h, inbox, [pair], sequences, limit=2000)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert inbox.tokens(sequence) == expected_tokens(prompt, 60, VOCAB)


def lose_windows(h: Harness, count: int) -> None:
    """Evict window blocks as if others had taken them: the least recently used first."""
    state = h.scheduler
    assert int(state["num_evictable_window_blocks"]) >= count
    owners, refs = h.state.array("window_owners", "u4"), h.state.array("window_refs", "u4")
    stamps, free = h.state.array("window_stamps", "u4"), h.state.array("free_window_blocks", "u4")
    idle = [w for w in range(len(owners)) if refs[w] == 0 and owners[w] != 0]
    for window in sorted(idle, key=lambda w: stamps[w])[:count]:
        h.state.array("block_windows", "u4")[owners[window] - 1] = 0
        owners[window] = 0
        free[state["num_free_window_blocks"]] = window
        state["num_free_window_blocks"] += 1
        state["num_evictable_window_blocks"] -= 1


@pytest.mark.parametrize(("lost", "found"), [(0, 56), (3, 56), (4, 48), (5, 0), (7, 0)])
def test_a_prefix_is_found_only_where_all_that_its_next_query_sees_is_there(lost: int, found: int) -> None:
    """A window of 20 at 56 tokens begins in the fifth block, and at 48 in the fourth.

    Three blocks were freed while the sequence ran, so these go first. Of its last ones the end goes first.
    """
    with running(small_config(), **with_windows(20, 40)) as h:
        pair = h.frontend()
        assert cached_tokens(h, pair, prompt_of(60)) == 0
        lose_windows(h, lost)
        assert cached_tokens(h, pair, prompt_of(60)) == found
        assert cached_tokens(h, pair, prompt_of(60)) == 56  # what was lost is computed again, and known again


def test_a_hit_is_cut_back_to_the_longest_prefix_whose_window_is_there() -> None:
    """The second prompt's own blocks are the newest, but the shared prefix was used last of all before."""
    with running(small_config(), **with_windows(8, 40)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        assert cached_tokens(h, pair, prompt_of(30)) == 24  # uses the window block before its 24 tokens again
        lose_windows(h, 6)
        assert cached_tokens(h, pair, prompt_of(60)) == 24


def test_nothing_is_found_after_a_reset_and_no_window_block_is_lost() -> None:
    with running(small_config(), **with_windows(12, 30)) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(60))
        pair.order(Opcode.RESET_PREFIX_CACHE)
        for _ in range(3):
            h.step()
        assert int(h.scheduler["num_free_window_blocks"]) == 30
        assert cached_tokens(h, pair, prompt_of(60)) == 0
        assert cached_tokens(h, pair, prompt_of(60)) == 56


def test_the_engine_tells_how_many_window_blocks_are_used() -> None:
    with running(small_config(), **with_windows(12, 30)) as h:
        pair = h.frontend()
        submit(h, pair, prompt_of(60), max_tokens=8)
        for _ in range(4):
            h.step()
        assert h.statistic("num_window_blocks") == 30
        assert h.statistic("num_window_blocks_used") == 8 - freed_behind(60 - ROLLBACK, 12)
        assert h.statistic("num_window_blocks_cached") == freed_behind(60 - ROLLBACK, 12)


def play_one_by_one(seed: int, requests: int) -> WindowCache:
    """Run requests one after the other, in an engine and in the model of its cache; both must find the same."""
    rng = random.Random(seed)
    step_tokens, window = rng.choice((8, 24, 32)), rng.choice((1, 5, 8, 17, 30))
    sizes = {"num_blocks": rng.choice((9, 14, 30)), "num_window_blocks": rng.choice((8, 10, 16))}
    config = small_config(max_num_seqs=1, max_num_batched_tokens=step_tokens)
    model = WindowCache(8, sizes["num_blocks"], sizes["num_window_blocks"], window, step_tokens)
    sizes |= with_windows(window, sizes["num_window_blocks"])
    with running(config, **sizes) as h:
        pair = h.frontend()
        for prompt in draw_prompts(rng, requests, 60):
            assert cached_tokens(h, pair, prompt) == model.play(prompt, 3)
            if rng.random() < 0.02:
                pair.order(Opcode.RESET_PREFIX_CACHE)
                for _ in range(3):
                    h.step()
                model.reset()
            state = h.scheduler
            found = [int(state[name]) for name in ("num_free_blocks", "num_evictable", "num_free_window_blocks")]
            assert found == [model.full.free, len(model.full.cached), model.windowed.free]
            assert int(state["num_evictable_window_blocks"]) == len(model.windowed.cached)
    return model


def test_the_cache_finds_what_its_model_does() -> None:
    models = [play_one_by_one(seed, 25) for seed in range(12)]
    assert sum(model.cuts for model in models) > 20
    assert sum(model.evicted_windows for model in models) > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_cache_finds_what_its_model_does_in_a_hundred_thousand_operations() -> None:
    """A request is about ten: a look-up, steps that take, register and free blocks, and its end."""
    for seed in range(100, 200):
        play_one_by_one(seed, 100)


def size_windows(seed: int) -> dict[str, int]:
    return with_windows(1 + seed * 7 % 40, 8 + seed % 11)


def test_windows_are_right_under_a_random_load() -> None:
    counts = play_episodes(range(SEEDS), size_windows)
    assert all(counts[name] > 0 for name in USUAL_EVENTS), counts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_windows_are_right_in_a_hundred_thousand_passes() -> None:
    play_episodes(range(100, 500), size_windows)


def test_states_and_windows_of_one_model_are_right() -> None:
    counts = play_episodes(range(4), lambda _: {"num_snapshots": 2, **with_windows(9, 12)})
    assert counts["prefix_hits"] > 0


@pytest.mark.parametrize(("lanes", "seeds"), [(3, 2), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (3, 8))])
def test_any_number_of_lanes_keeps_the_same_windows(lanes: int, seeds: int, lane_steps: Callable[[int], Step]) -> None:
    assert play_episodes(range(seeds), size_windows, lane_steps(lanes)) == play_episodes(range(seeds), size_windows)


def test_blocks_of_an_answer_are_found_with_their_windows() -> None:
    with running(small_config(), **with_windows(10, 30)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(12)
        entry = submission(prompt, (), h.hashes(prompt), 0, h.hash_root())
        sequence = pair.submit(entry, SamplingParams(max_tokens=30))
        run_until_finished(h, inbox, [pair], [sequence])
        assert cached_tokens(h, pair, [*prompt, *expected_tokens(prompt, 30, VOCAB)]) == 40
