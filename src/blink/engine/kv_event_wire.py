# SPDX-License-Identifier: Apache-2.0
"""Events of the KV cache as vLLM sends them: msgpack arrays, each event with its name first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from blink.region.kv_events import CacheEvent
from blink.region.layout import KvEventKind

MEDIUM: Final = "GPU"  # the engine's own KV cache, wherever it runs; routers know this word
_CLEARED: Final = ["AllBlocksCleared"]


def to_wire(events: Iterable[CacheEvent], block_size: int) -> list[list[Any]]:
    """Return vLLM's events. Blocks that follow each other in a prompt are one event, and so are removals in a row."""
    found: list[list[Any]] = []
    last = 0  # the hash of the newest event's last block
    for event in events:
        before: list[Any] = found[-1] if found else [""]
        if event.kind == KvEventKind.STORED:
            if before[0] == "BlockStored" and event.parent == last:
                before[1].append(event.hash)
                before[3].extend(event.tokens)
            else:
                found.append(_stored(event, block_size))
        elif event.kind == KvEventKind.REMOVED:
            if before[0] == "BlockRemoved":
                before[1].append(event.hash)
            else:
                found.append(["BlockRemoved", [event.hash], MEDIUM])
        else:
            found.append(_CLEARED)
        last = event.hash
    return found


def _stored(event: CacheEvent, block_size: int) -> list[Any]:
    """The fields are vLLM's: block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name."""
    return ["BlockStored", [event.hash], event.parent, [*event.tokens], block_size, None, MEDIUM, None]
