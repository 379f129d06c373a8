# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets a prompt: the one that has computed its beginning, unless it has much more to do.

How much more depends on the beginning's length: without it, another engine would compute that once more.

Frontends know no engine's prefix cache. Each remembers where it sent which blocks. If a prompt is new, a hash decides
among the least loaded engines: so several frontends choose the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from blink.region.block_hashes import HASH_BYTES
from blink.request.prefix_table import PrefixTable

_MAX_POINTS = 256  # blocks of a prompt; what follows them decides nothing
_MAX_IMBALANCE = 16  # load that an engine with the prompt's beginning may have beyond the least loaded one
_BLOCKS_PER_LOAD = 2  # cached blocks that one running sequence more is worth
_WAITING = 4  # a sequence that waits says more than one that runs, as in vLLM
_SILENT_SECONDS = 1.0  # seconds without a sign of life, after which an engine is the last choice
_SILENT_LOAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do."""

    running: int  # sequences of all frontends
    waiting: int
    own: int  # sequences of this frontend: also those that the engine has not counted yet
    boot: int = 0  # which of the engine's lives this is: its cache begins empty
    silent_seconds: float = 0.0

    @property
    def weight(self) -> int:
        """Return the load as one number."""
        silent = _SILENT_LOAD if self.silent_seconds > _SILENT_SECONDS else 0
        return max(self.running + self.waiting, self.own) + (_WAITING - 1) * self.waiting + silent


class PrefixRouter:
    """Rank engines for one prompt after the other."""

    def __init__(self) -> None:
        self._table = PrefixTable[tuple[int, int]]()
        self._given: dict[int, int] = {}

    def rank(self, block_hashes: bytes, loads: Mapping[int, Load]) -> list[int]:
        """Return the engines of `loads`, by number, the best for a prompt first."""
        weights = {engine: load.weight for engine, load in loads.items()}
        if len(weights) < 2:
            return [*weights]
        lowest = min(weights.values())
        lives = {(engine, load.boot) for engine, load in loads.items()}
        cached, num_blocks = self._table.longest(_points(block_hashes), lives)
        bound = lowest + min(_MAX_IMBALANCE, num_blocks // _BLOCKS_PER_LOAD)
        near = {engine for engine, _ in cached if weights[engine] <= bound}
        first = block_hashes[:HASH_BYTES]

        def order(engine: int) -> tuple[bool, int, int, bytes]:
            chance = blake2b(first, digest_size=8, key=bytes([engine])).digest() if first else b""
            given = 0 if first else self._given.get(engine, 0)
            return engine not in near, weights[engine], given, chance

        return sorted(weights, key=order)

    def note(self, block_hashes: bytes, engine: int, load: Load) -> None:
        """Remember that an engine got a prompt."""
        self._given[engine] = self._given.get(engine, 0) + 1
        self._table.add(_points(block_hashes), (engine, load.boot))

    def forget(self) -> None:
        """Remember nothing: the engines' caches are empty."""
        self._table = PrefixTable()


def _points(block_hashes: bytes) -> tuple[bytes, ...]:
    """Return the hash of each of the first blocks: it covers all that comes before, too."""
    end = min(len(block_hashes), _MAX_POINTS * HASH_BYTES)
    return tuple(block_hashes[at : at + HASH_BYTES] for at in range(0, end, HASH_BYTES))
