# SPDX-License-Identifier: Apache-2.0
"""The prompt arena against a plain model: a set of taken units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blink.region.arena import Arena, span_bytes

SIZE = 1024
UNIT = span_bytes(1)
# Positive: allocate that many bytes. Otherwise: free the span taken that many spans ago.
ACTIONS = st.lists(st.one_of(st.integers(1, 400), st.integers(-20, 0)), max_size=60)


def play(actions: list[int]) -> tuple[Arena, list[tuple[int, int]]]:
    """Run the actions, checking each allocation, and return the arena and the spans still taken."""
    arena, taken = Arena(SIZE), list[tuple[int, int]]()
    for action in actions:
        if action <= 0:
            if taken:
                arena.free(*taken.pop(action % len(taken)))
            continue
        used = {unit for start, size in taken for unit in range(start, start + span_bytes(size), UNIT)}
        need = range(0, span_bytes(action), UNIT)
        fits = (s for s in range(0, SIZE - span_bytes(action) + 1, UNIT) if not any(s + unit in used for unit in need))
        offset = arena.allocate(action)
        assert offset == next(fits, None), "not the first span that fits"
        if offset is not None:
            taken.append((offset, action))
        assert arena.free_bytes == SIZE - sum(span_bytes(size) for _, size in taken)
    return arena, taken


@given(ACTIONS)
def test_allocation_is_first_fit_and_spans_never_overlap(actions: list[int]) -> None:
    play(actions)


@given(ACTIONS, st.randoms(use_true_random=False))
def test_freeing_everything_in_any_order_joins_all_spans_again(actions: list[int], random: object) -> None:
    arena, taken = play(actions)
    random.shuffle(taken)  # type: ignore[attr-defined]
    for offset, size in taken:
        arena.free(offset, size)
    assert arena.allocate(SIZE) == 0 and arena.allocate(1) is None


def test_an_odd_size_is_rounded_down_to_whole_units() -> None:
    arena = Arena(SIZE + UNIT - 1)
    assert arena.free_bytes == SIZE
    assert arena.allocate(SIZE + 1) is None


def test_even_nothing_takes_a_unit_so_that_spans_differ() -> None:
    arena = Arena(SIZE)
    assert [arena.allocate(0), arena.allocate(0)] == [0, UNIT]
