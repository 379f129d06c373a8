# SPDX-License-Identifier: Apache-2.0
"""Block hashes against SipHash written down a second time, which is checked against its authors' own values."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blink.region.block_hashes import HASH_BYTES, hash_blocks, hash_root

KEY = bytes(range(16))
_MASK = 2**64 - 1


def rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _MASK


def siphash(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with 128 bits."""
    k0, k1 = struct.unpack("<2Q", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def mix(rounds: int) -> None:
        for _ in range(rounds):
            for a, b, c, left, right in ((0, 1, 2, 13, 16), (2, 1, 0, 17, 21)):
                v[a] = v[a] + v[b] & _MASK
                v[c] = v[c] + v[3] & _MASK
                v[b] = rotate(v[b], left) ^ v[a]
                v[3] = rotate(v[3], right) ^ v[c]
                v[a] = rotate(v[a], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        mix(2)
        v[0] ^= word
    halves: list[int] = []
    for place, mark in ((2, 0xEE), (1, 0xDD)):
        v[place] ^= mark
        mix(4)
        halves.append(v[0] ^ v[1] ^ v[2] ^ v[3])
    return struct.pack("<2Q", *halves)


def test_the_reference_gives_the_published_values() -> None:
    assert siphash(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash(KEY, bytes(range(8))).hex() == "3b62a9ba6258f5610f83e264f31497b4"


def chain(tokens: list[int], block_size: int, key: bytes, root: bytes) -> list[bytes]:
    hashes = [root]
    for block in range(len(tokens) // block_size):
        data = struct.pack(f"<{block_size}i", *tokens[block * block_size : (block + 1) * block_size])
        hashes.append(siphash(key, hashes[-1] + data))
    return hashes[1:]


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


@given(TOKENS, st.sampled_from([2, 8, 16]), st.binary(max_size=20))
def test_hashes_equal_the_reference(tokens: list[int], block_size: int, salt: bytes) -> None:
    root = hash_root(KEY, salt)
    expected = b"".join(chain(tokens, block_size, KEY, root))
    assert hash_blocks(np.array(tokens, np.int32), block_size, KEY, root) == expected


def test_equal_prefixes_and_nothing_else_share_hashes() -> None:
    root = hash_root(KEY)
    first = hash_blocks(np.arange(64, dtype=np.int32), 16, KEY, root)
    changed = np.arange(64, dtype=np.int32)
    changed[40] += 1
    second = hash_blocks(changed, 16, KEY, root)
    assert first[: 2 * HASH_BYTES] == second[: 2 * HASH_BYTES]
    assert first[2 * HASH_BYTES : 3 * HASH_BYTES] != second[2 * HASH_BYTES : 3 * HASH_BYTES]
    assert first[3 * HASH_BYTES :] != second[3 * HASH_BYTES :]


def test_salt_and_key_separate_all_blocks() -> None:
    tokens = np.arange(32, dtype=np.int32)
    other_key = bytes(16)
    chains = [(KEY, hash_root(KEY)), (KEY, hash_root(KEY, b"tenant")), (other_key, hash_root(other_key))]
    hashed = [hash_blocks(tokens, 16, key, root) for key, root in chains]
    assert len({data[start : start + HASH_BYTES] for data in hashed for start in (0, HASH_BYTES)}) == 6
