# SPDX-License-Identifier: Apache-2.0
"""Name the full blocks of a prompt for the engine's prefix cache."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from blink.region.layout import CONSTANTS

HASH_BYTES = CONSTANTS["block_hash_bytes"]


def hash_blocks(tokens: npt.NDArray[np.int32], block_size: int, key: bytes, salt: bytes = b"") -> bytes:
    """Return the chained 128-bit keyed hashes of all full blocks, concatenated.

    The hash of a block covers everything before it, so equal hashes mean equal prefixes; the key is the engine's
    secret, so no client can construct a collision; the salt separates tenants who must not share cache hits.
    """
    data = tokens.astype("<i4", copy=False).tobytes()
    block_bytes = 4 * block_size
    digest = blake2b(salt, key=key, digest_size=HASH_BYTES).digest()
    hashes: list[bytes] = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        digest = blake2b(digest + data[start : start + block_bytes], key=key, digest_size=HASH_BYTES).digest()
        hashes.append(digest)
    return b"".join(hashes)
