# SPDX-License-Identifier: Apache-2.0
"""Prefixes of models with recurrent layers: found only as far as a snapshot of their states, and always the right one.

The harness plays the states: each row must find those of all tokens before it in its slot.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blink.region.layout import Opcode
from blink.sampling_params import SamplingParams
from harness import (
    Inbox,
    Step,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submission,
)
from random_load import USUAL_EVENTS, play_episodes
from test_prefix_cache import VOCAB, cached_tokens, prompt_of

SEEDS = 12


@pytest.mark.parametrize("length", [*range(23, 36), 8, 9, 16, 17])
def test_an_equal_prompt_is_found_up_to_its_last_block_that_leaves_a_token(length: int) -> None:
    with running(small_config(), num_snapshots=4) as h:
        pair = h.frontend()
        assert cached_tokens(h, pair, prompt_of(length)) == 0
        assert cached_tokens(h, pair, prompt_of(length)) == (length - 1) // 8 * 8
        assert cached_tokens(h, pair, prompt_of(60)) == (length - 1) // 8 * 8


def test_a_shared_prefix_is_found_by_the_third_prompt() -> None:
    with running(small_config(), num_snapshots=4) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(40))
        assert cached_tokens(h, pair, [*prompt_of(20), *prompt_of(20, 50)]) == 0
        assert cached_tokens(h, pair, [*prompt_of(20), *prompt_of(20, 70)]) == 16
        assert cached_tokens(h, pair, prompt_of(40)) == 32


def test_states_behind_blocks_of_an_answer_are_kept_now_and_then() -> None:
    with running(small_config(), num_snapshots=4, snapshot_interval=2) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(12)
        entry = submission(prompt, (), h.hashes(prompt), 0, h.hash_root())
        sequence = pair.submit(entry, SamplingParams(max_tokens=30))
        run_until_finished(h, inbox, [pair], [sequence])
        text = [*prompt, *expected_tokens(prompt, 30, VOCAB)]
        assert cached_tokens(h, pair, text) == 32


def test_the_least_recently_used_snapshot_makes_room() -> None:
    with running(small_config(), num_snapshots=2) as h:
        pair = h.frontend()
        for start in (0, 1):
            cached_tokens(h, pair, prompt_of(20, start))
        assert cached_tokens(h, pair, prompt_of(20, 0)) == 16
        cached_tokens(h, pair, prompt_of(20, 2))
        assert cached_tokens(h, pair, prompt_of(20, 0)) == 16
        assert cached_tokens(h, pair, prompt_of(20, 1)) == 0


def test_nothing_is_found_after_a_reset() -> None:
    with running(small_config(), num_snapshots=4) as h:
        pair = h.frontend()
        cached_tokens(h, pair, prompt_of(40))
        pair.order(Opcode.RESET_PREFIX_CACHE)
        for _ in range(3):
            h.step()
        assert cached_tokens(h, pair, prompt_of(40)) == 0
        assert cached_tokens(h, pair, prompt_of(40)) == 32


def size_snapshots(seed: int) -> dict[str, int]:
    return {"num_snapshots": 1 + seed % 5}


def test_states_are_right_under_a_random_load() -> None:
    counts = play_episodes(range(SEEDS), size_snapshots)
    assert all(counts[name] > 0 for name in USUAL_EVENTS), counts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_states_are_right_in_a_hundred_thousand_passes() -> None:
    play_episodes(range(100, 500), size_snapshots)


@pytest.mark.parametrize("lanes", [3, pytest.param(8, marks=pytest.mark.long)])
def test_any_number_of_lanes_keeps_the_same_states(lanes: int, lane_steps: Callable[[int], Step]) -> None:
    assert play_episodes(range(4), size_snapshots, lane_steps(lanes)) == play_episodes(range(4), size_snapshots)
