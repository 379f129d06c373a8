# SPDX-License-Identifier: Apache-2.0
"""The memory of the KV cache is divided between blocks and window blocks; and what one sequence keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blink.engine.cache_size import CacheShape, CacheSize
from blink.errors import ConfigError
from blink.models.cache_layout import CacheLayout, PerToken
from blink.models.weights.source import read_spec

_KIB, _GIB = 1 << 10, 1 << 30
FULL, SHOWN = PerToken(kv_heads=2, head_dim=512), PerToken(kv_heads=8, head_dim=256, window=1024)
MIXED = CacheLayout.of([SHOWN] * 25 + [FULL] * 5)  # Gemma 4 26B-A4B
WINDOWS, PLAIN = CacheLayout.of([SHOWN] * 4), CacheLayout.of([FULL] * 4)


def shape(layout: CacheLayout, max_model_len: int = 32768, step_tokens: int = 2048) -> CacheShape:
    return CacheShape(layout=layout, block_size=16, itemsize=2, max_model_len=max_model_len, step_tokens=step_tokens)


def test_layers_with_a_window_have_bytes_of_their_own() -> None:
    assert MIXED.window == 1024 and PLAIN.window == 0
    assert MIXED.block_bytes(1, 2) == (5 * 4 * _KIB, 25 * 8 * _KIB)
    assert MIXED.bytes_per_block(1, 2) == 220 * _KIB
    assert [group.layers for group in CacheLayout.of([SHOWN, FULL, SHOWN]).groups] == [(0, 2), (1,)]


def test_a_long_sequence_keeps_its_window_and_what_may_be_taken_back() -> None:
    assert shape(MIXED).kept_blocks == 66  # (1,023 + 16 + 1) / 16, and one that is begun at either end
    assert shape(MIXED).most_window_blocks == 194
    assert shape(MIXED).bytes_of_longest == 32768 * 20 * _KIB + 66 * 16 * 200 * _KIB < 1.1e9
    assert shape(MIXED, 600).kept_blocks == 38  # all its blocks
    assert shape(PLAIN).kept_blocks == 0
    assert shape(PLAIN).bytes_of_longest == 32768 * 16 * _KIB


@pytest.mark.parametrize("layout", [MIXED, WINDOWS])
@pytest.mark.parametrize("room", [2 * _GIB, 10 * _GIB, 60 * _GIB + 12345])
def test_both_kinds_fill_the_room(layout: CacheLayout, room: int) -> None:
    of = shape(layout)
    size = of.divide(room)
    assert room - sum(of.block_bytes) < of.count_bytes(size) <= room
    assert size.num_blocks >= of.max_blocks
    assert size.num_window_blocks >= of.most_window_blocks
    assert size.num_blocks >= size.num_window_blocks


def test_sequences_of_four_windows_use_up_both_kinds_together() -> None:
    size = shape(MIXED).divide(60 * _GIB)
    assert size.num_blocks / 256 == pytest.approx(size.num_window_blocks / 66, rel=0.02)


def test_the_longest_sequence_fits_if_there_is_memory_for_it() -> None:
    longest = shape(MIXED, 262144)
    room = longest.count_bytes(CacheSize(longest.max_blocks, longest.most_window_blocks))
    assert longest.divide(room) == CacheSize(longest.max_blocks, longest.most_window_blocks)
    assert longest.divide(room - 1).num_blocks == longest.max_blocks - 1


def test_a_number_of_blocks_is_completed() -> None:
    assert shape(PLAIN).complete(100) == CacheSize(100, 0)
    assert shape(PLAIN).divide(_GIB) == CacheSize(_GIB // (256 * _KIB), 0)
    assert shape(MIXED).complete(2560) == CacheSize(2560, 660)
    assert shape(MIXED).complete(100) == CacheSize(100, 194)


def test_blocks_without_memory_last_longer_than_window_blocks() -> None:
    size = shape(WINDOWS).divide(10 * _GIB)
    assert size.num_window_blocks == 10 * _GIB // (16 * 32 * _KIB)
    assert size.num_blocks // 1024 == size.num_window_blocks // 66  # sequences of 16 windows


def test_gemma_4_26b_takes_at_most_so_much_a_sequence(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma4_text", "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704, "sliding_window": 1024, "vocab_size": 262144,
        "max_position_embeddings": 262144,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    layout = read_spec(tmp_path).limit(32768).cache_layout
    assert layout.block_bytes(1, 2) == MIXED.block_bytes(1, 2)
    assert shape(layout).bytes_of_longest < 1.1e9


def test_too_few_window_blocks_for_one_sequence_are_refused() -> None:
    size = CacheSize(4096, 194)
    assert shape(MIXED).window_sizes(size) == {"window": 1024, "num_window_blocks": 194, "window_lru_entries": 1024}
    with pytest.raises(ConfigError, match="193 window blocks is too small for one sequence, which takes 194"):
        shape(MIXED).window_sizes(CacheSize(4096, 193))
    assert shape(PLAIN).window_sizes(CacheSize(4096, 0)) == {}
