# SPDX-License-Identifier: Apache-2.0
"""What a router knows of an engine's prefix cache: an index that vLLM's events keep up to date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CacheIndex:
    """The blocks of one engine: the hash of each, with the hash of the one before it and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.num_clears = 0

    def apply(self, events: Iterable[list[Any]]) -> None:
        """Follow the events of one batch, as arrays with their names first."""
        for name, *values in events:
            if name == "BlockStored":
                self._store(*values)
            elif name == "BlockRemoved":
                hashes, medium = values
                assert medium == "GPU"
                for block_hash in hashes:
                    del self.blocks[block_hash]  # which is there: nobody is told of a block twice
            else:
                assert (name, values) == ("AllBlocksCleared", [])
                self.blocks.clear()
                self.num_clears += 1

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
    ) -> None:
        assert (lora_id, medium, lora_name) == (None, "GPU", None)
        assert len(tokens) == len(hashes) * block_size
        for i, block_hash in enumerate(hashes):
            assert block_hash not in self.blocks, "a block was stored that was there"
            self.blocks[block_hash] = parent, tuple(tokens[i * block_size : (i + 1) * block_size])
            parent = block_hash
