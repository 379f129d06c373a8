# SPDX-License-Identifier: Apache-2.0
"""Prefixes of models with recurrent layers: found only as far as a snapshot of their states, and always the right one.

The harness plays the states: each row must find those of all tokens before it in its slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize(("lanes", "seeds"), [(3, 2), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (3, 8))])
def test_any_number_of_lanes_keeps_the_same_states(lanes: int, seeds: int, lane_steps: Callable[[int], Step]) -> None:
    assert play_episodes(range(seeds), size_snapshots, lane_steps(lanes)) == play_episodes(range(seeds), size_snapshots)


@pytest.mark.parametrize("drafts", [1, 2, 4, 15])
@pytest.mark.parametrize("wrong", [0, 3, 4, 5, 8])
def test_states_take_in_drafts_once_they_are_accepted(drafts: int, wrong: int) -> None:
    """Every `wrong`th token of the prediction is another: drafts are cut at all places. Snapshots are found behind."""
    config = small_config(speculative_config=json.dumps(drafting(drafts)))
    sizes = {"max_model_len": 256, "num_blocks": 64, "num_snapshots": 8, "snapshot_interval": 2}
    with running(config, **sizes) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(12)
        answer = expected_tokens(prompt, 90, VOCAB)
        guess = [(token + 1) % VOCAB if wrong and at % wrong == 0 else token for at, token in enumerate(answer)]
        entry = submission(prompt, (), h.hashes(prompt), 0, h.hash_root())._replace(prediction=guess)
        sequence = pair.submit(entry, SamplingParams(max_tokens=90))
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == answer
        assert h.statistic("accepted_tokens") > 4
        assert cached_tokens(h, pair, [*prompt, *answer]) == (12 + 90 - 1) // 16 * 16


def drafting(num_tokens: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_min": 1}


def speculate(seed: int) -> dict[str, Any]:
    return size_snapshots(seed) | {"speculative_config": json.dumps(drafting(1 + seed % 4))}


def test_states_are_right_under_a_random_load_with_drafts() -> None:
    counts = play_episodes(range(SEEDS), speculate)
    assert all(counts[name] > 0 for name in (*USUAL_EVENTS, "num_drafts", "accepted_tokens")), counts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_states_are_right_in_a_hundred_thousand_passes_with_drafts() -> None:
    play_episodes(range(100, 500), speculate)
