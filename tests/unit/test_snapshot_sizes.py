# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states and the KV cache share the memory that is there."""

from __future__ import annotations

import pytest

from blink.engine.geometry import count_snapshots, fit_sequences, spare_snapshots

_BLOCK, _SLOT = 16 * 20 << 10, 64 << 20  # of Qwen3.6-35B-A3B


@pytest.mark.parametrize("room", [10 * _SLOT, 39 * _SLOT, 40 * _SLOT, 41 * _SLOT, 1000 * _SLOT, 1000 * _SLOT + 12345])
def test_the_kv_cache_and_its_snapshots_fill_the_room(room: int) -> None:
    kept = spare_snapshots(room, _SLOT)
    num_blocks = kept // _BLOCK
    left = room - num_blocks * _BLOCK - count_snapshots(num_blocks, _BLOCK, _SLOT) * _SLOT
    assert 0 <= left < _SLOT + 2 * _BLOCK


def test_a_small_cache_has_some_snapshots_and_none_more_than_blocks() -> None:
    assert count_snapshots(100, _BLOCK, _SLOT) == 8
    assert count_snapshots(5, _BLOCK, _SLOT) == 5
    assert count_snapshots(100_000, _BLOCK, _SLOT) == 100_000 * _BLOCK // 4 // _SLOT


@pytest.mark.parametrize("most", [256, 8])
@pytest.mark.parametrize(("room", "fitting"), [(0, 1), (4, 1), (28, 7), (35, 8), (400, 96), (5000, 256)])
def test_states_of_running_and_parked_sequences_take_half_of_the_room(room: int, fitting: int, most: int) -> None:
    assert fit_sequences(most, room * _SLOT, _SLOT) == min(fitting, most)


def test_models_without_states_give_nothing_up() -> None:
    assert fit_sequences(256, 12345, 0) == 256
    assert count_snapshots(100, _BLOCK, 0) == 0
    assert spare_snapshots(12345, 0) == 12345
