# SPDX-License-Identifier: Apache-2.0
"""The engine host's end of the ring in which the scheduler notes events of the prefix cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from blink.region.layout import KvEventKind, field_offset, struct_dtype
from blink.region.memory import Region
from blink.region.native import lib

_EVENT, _WORDS, _LAYOUT = (struct_dtype(name) for name in ("KvEvent", "KvEventWords", "KvEventLayout"))


class CacheEvent(NamedTuple):
    """One event: a block was stored or removed, or all were, by `kind`. Hashes are the low halves of a block's."""

    kind: KvEventKind
    hash: int = 0
    parent: int | None = None  # of a stored block: the one before it in its prompt
    tokens: tuple[int, ...] = ()


class KvEventRing:
    """Reads events; one reader for each region. csrc/region/kv_events.h has the protocol."""

    def __init__(self, region: Region) -> None:
        layout: Any = np.zeros((), _LAYOUT)
        geometry = np.ascontiguousarray(region.geometry)
        lib.blink_kv_event_layout(geometry.ctypes.data, layout.ctypes.data)
        start, self._size = int(region.header["kv_events_offset"]), int(region.geometry["num_kv_events"])
        block_size = int(region.geometry["block_size"])
        self._written = region.address + start + field_offset(_WORDS, "written")
        self._read_word = region.address + start + field_offset(_WORDS, "read")
        self._events = region.view(_EVENT, start + int(layout["events"]), self._size)
        tokens = region.view(np.dtype("i4"), start + int(layout["tokens"]), self._size * block_size)
        self._tokens = tokens.reshape(self._size, block_size)
        self._read = 0

    def take(self, limit: int) -> list[CacheEvent]:
        """Return up to `limit` events that are new, and give their place back to the scheduler."""
        count = min(lib.blink_load_u64(self._written) - self._read, limit)
        if count == 0:
            return []
        at = np.arange(self._read, self._read + count) % self._size
        events = self._events[at].tolist()
        taken = [_event(event, tokens) for event, tokens in zip(events, self._tokens[at].tolist(), strict=True)]
        self._read += count
        lib.blink_store_u64(self._read_word, self._read)
        return taken


def _event(words: tuple[int, int, int, int], tokens: list[int]) -> CacheEvent:
    kind, has_parent, block_hash, parent = words
    if kind != KvEventKind.STORED:
        return CacheEvent(KvEventKind(kind), block_hash)
    return CacheEvent(KvEventKind.STORED, block_hash, parent if has_parent else None, tuple(tokens))
