# SPDX-License-Identifier: Apache-2.0
"""Block hashes against a word-for-word reference."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blink.text.prompt import HASH_BYTES, hash_blocks

KEY = bytes(range(16))


def chain(tokens: list[int], block_size: int, key: bytes, salt: bytes) -> list[bytes]:
    hashes = [blake2b(salt, key=key, digest_size=16).digest()]
    for block in range(len(tokens) // block_size):
        data = b"".join(struct.pack("<i", token) for token in tokens[block * block_size : (block + 1) * block_size])
        hashes.append(blake2b(hashes[-1] + data, key=key, digest_size=16).digest())
    return hashes[1:]


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


@given(TOKENS, st.sampled_from([1, 8, 16]), st.binary(max_size=20))
def test_hashes_equal_the_reference(tokens: list[int], block_size: int, salt: bytes) -> None:
    expected = b"".join(chain(tokens, block_size, KEY, salt))
    assert hash_blocks(np.array(tokens, np.int32), block_size, KEY, salt) == expected


def test_equal_prefixes_and_nothing_else_share_hashes() -> None:
    first = hash_blocks(np.arange(64, dtype=np.int32), 16, KEY)
    changed = np.arange(64, dtype=np.int32)
    changed[40] += 1
    second = hash_blocks(changed, 16, KEY)
    assert first[: 2 * HASH_BYTES] == second[: 2 * HASH_BYTES]
    assert first[2 * HASH_BYTES : 3 * HASH_BYTES] != second[2 * HASH_BYTES : 3 * HASH_BYTES]
    assert first[3 * HASH_BYTES :] != second[3 * HASH_BYTES :]


def test_salt_and_key_separate_all_blocks() -> None:
    tokens = np.arange(32, dtype=np.int32)
    plain, salted = hash_blocks(tokens, 16, KEY), hash_blocks(tokens, 16, KEY, b"tenant")
    other = hash_blocks(tokens, 16, bytes(16))
    blocks = [data[start : start + HASH_BYTES] for data in (plain, salted, other) for start in (0, HASH_BYTES)]
    assert len(set(blocks)) == 6
