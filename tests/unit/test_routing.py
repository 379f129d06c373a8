# SPDX-License-Identifier: Apache-2.0
"""Which of several engines a prompt goes to: by what they have computed, by their load, and alike in all frontends."""

from __future__ import annotations

from collections import Counter

import pytest

from blink.request.routing import Load, PrefixRouter

_IDLE = Load(running=0, waiting=0, own=0)


def hashes(*blocks: int) -> bytes:
    """Stand for chained hashes: a block that another prompt has too stands behind the same blocks."""
    return b"".join(block.to_bytes(16, "little") for block in blocks)


def run(count: int, *, waiting: int = 0) -> Load:
    return Load(running=count, waiting=waiting, own=0)


def idle(count: int) -> dict[int, Load]:
    return dict.fromkeys(range(count), _IDLE)


def test_a_prompt_with_a_known_beginning_goes_where_that_was_computed() -> None:
    router = PrefixRouter()
    router.note(hashes(1, 2, 3), 1, _IDLE)
    router.note(hashes(9), 0, _IDLE)
    assert router.rank(hashes(1, 2, 7), idle(3))[0] == 1
    assert router.rank(hashes(9, 8), idle(3))[0] == 0


def test_the_longest_known_beginning_decides() -> None:
    router = PrefixRouter()
    router.note(hashes(1), 0, _IDLE)
    router.note(hashes(1, 2), 1, _IDLE)
    router.note(hashes(1, 3, 4), 2, _IDLE)
    assert [router.rank(prompt, idle(3))[0] for prompt in (hashes(1, 2, 9), hashes(1, 3), hashes(1, 3, 4, 5))] == [
        1, 2, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(("num_blocks", "allowed"), [(2, 1), (8, 4), (32, 16), (400, 16)])
def test_a_longer_beginning_is_worth_more_load_up_to_a_bound(num_blocks: int, allowed: int) -> None:
    router, prompt = PrefixRouter(), hashes(*range(1, num_blocks + 1))
    router.note(prompt, 0, _IDLE)
    assert router.rank(prompt, {0: run(3 + allowed), 1: run(3)})[0] == 0
    assert router.rank(prompt, {0: run(4 + allowed), 1: run(3)})[0] == 1


def test_without_a_known_beginning_the_least_loaded_engine_gets_it() -> None:
    router = PrefixRouter()
    assert router.rank(hashes(5), {0: run(3), 1: run(2), 2: run(9)}) == [1, 0, 2]
    assert router.rank(b"", {0: run(3), 1: run(2), 2: run(9)}) == [1, 0, 2]


def test_a_sequence_that_waits_counts_more_than_one_that_runs() -> None:
    assert PrefixRouter().rank(b"", {0: run(1, waiting=2), 1: run(8)}) == [1, 0]


def test_what_the_engine_has_not_counted_yet_counts() -> None:
    burst = Load(running=0, waiting=0, own=5)
    assert PrefixRouter().rank(b"", {0: burst, 1: run(3)}) == [1, 0]


def test_frontends_agree_on_the_engine_of_a_new_prompt_and_spread_them() -> None:
    chosen = [PrefixRouter().rank(hashes(block, 1), idle(4))[0] for block in range(400)]
    assert chosen == [PrefixRouter().rank(hashes(block, 2), idle(4))[0] for block in range(400)]
    assert min(Counter(chosen).values()) > 60  # of 100; by chance below it is one in a hundred thousand


def test_short_prompts_take_turns_on_idle_engines() -> None:
    router, given = PrefixRouter(), Counter[int]()
    for _ in range(30):
        engine = router.rank(b"", idle(3))[0]
        router.note(b"", engine, _IDLE)
        given[engine] += 1
    assert given == {0: 10, 1: 10, 2: 10}


def test_an_engine_that_began_anew_has_nothing_cached() -> None:
    router, prompt = PrefixRouter(), hashes(*range(1, 9))
    router.note(prompt, 0, _IDLE)
    assert router.rank(prompt, {0: run(2), 1: run(0)})[0] == 0
    again = Load(running=2, waiting=0, own=0, boot=1)
    assert router.rank(prompt, {0: again, 1: run(0)})[0] == 1


def test_a_silent_engine_is_the_last_choice_whatever_it_has_cached() -> None:
    router, prompt = PrefixRouter(), hashes(*range(1, 99))
    router.note(prompt, 0, _IDLE)
    silent = Load(running=0, waiting=0, own=0, silent_seconds=1.5)
    assert router.rank(prompt, {0: silent, 1: run(200)}) == [1, 0]


def test_nothing_is_known_after_the_caches_were_emptied() -> None:
    router, prompt = PrefixRouter(), hashes(*range(1, 9))
    router.note(prompt, 0, _IDLE)
    router.forget()
    assert router.rank(prompt, {0: run(1), 1: run(0)})[0] == 1
