# SPDX-License-Identifier: Apache-2.0
"""The hashes by which the prefix cache knows blocks of tokens."""

from __future__ import annotations

from ctypes import byref, c_char
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from blink.region.layout import CONSTANTS
from blink.region.native import lib

HASH_BYTES = CONSTANTS["block_hash_bytes"]


def hash_root(key: bytes, salt: bytes = b"") -> bytes:
    """Return what a chain of block hashes begins with: the salt separates tenants who must not share cache hits."""
    return blake2b(salt, key=key, digest_size=HASH_BYTES).digest()


def hash_blocks(tokens: npt.NDArray[np.int32], block_size: int, key: bytes, root: bytes) -> bytes:
    """Return the chained 128-bit keyed hashes of all full blocks, concatenated (csrc/scheduler/block_hash.h).

    The hash of a block covers everything before it, so equal hashes mean equal prefixes; the key is the engine's
    secret, so no client can construct a collision.
    """
    num_blocks = len(tokens) // block_size
    if not num_blocks:
        return b""
    hashes = bytearray(num_blocks * HASH_BYTES)
    # Bytes, as the address of a numpy array takes twice the time of hashing some blocks.
    data, out = np.asarray(tokens, np.int32).tobytes(), byref(c_char.from_buffer(hashes))
    lib.blink_hash_blocks(key, root, data, num_blocks, block_size, out)
    return bytes(hashes)
