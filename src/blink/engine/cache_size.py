# SPDX-License-Identifier: Apache-2.0
"""How many blocks the KV cache has, and how many window blocks of layers whose queries see only the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from blink.engine.geometry import count_window_blocks, window_sizes
from blink.models.cache_layout import CacheLayout

# The sequences for which memory is divided are so many windows long. Shorter ones run out of window blocks first, and
# longer ones of blocks. Where all layers have a window, blocks take no memory, and there may be more of them.
_WINDOWS_OF_SEQUENCE = 4
_WINDOWS_OF_SEQUENCE_WITHOUT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The blocks of all sequences together."""

    num_blocks: int
    num_window_blocks: int  # 0: no layer has a window


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a sequence takes of the KV cache."""

    layout: CacheLayout
    block_size: int
    itemsize: int  # bytes of a number
    max_model_len: int
    step_tokens: int  # of the longest chunk of a prompt

    @property
    def block_bytes(self) -> tuple[int, int]:
        """The bytes of a block, and of a window block."""
        return self.layout.block_bytes(self.block_size, self.itemsize)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def kept_blocks(self) -> int:
        """Window blocks that a long sequence keeps while it decodes; 0: no layer has a window."""
        return self._count_window_blocks(1)

    @property
    def most_window_blocks(self) -> int:
        """Window blocks that one sequence takes at most: in the longest chunk of its prompt."""
        return self._count_window_blocks(self.step_tokens)

    def _count_window_blocks(self, chunk: int) -> int:
        if not self.layout.window:
            return 0
        return min(count_window_blocks(self.layout.window, chunk, self.block_size), self.max_blocks)

    def window_sizes(self, size: CacheSize) -> dict[str, int]:
        """Return the fields of a geometry for layers with a window.

        Raises:
            ConfigError: there are too few window blocks for one sequence.
        """
        return window_sizes(self.layout.window, size.num_window_blocks, self.most_window_blocks)

    @property
    def bytes_of_longest(self) -> int:
        """What the longest sequence keeps while it decodes."""
        return self.count_bytes(CacheSize(self.max_blocks, self.kept_blocks))

    def count_bytes(self, size: CacheSize) -> int:
        """Return the bytes of some blocks."""
        full, window = self.block_bytes
        return size.num_blocks * full + size.num_window_blocks * window

    @property
    def least_bytes(self) -> int:
        """The memory of one block, and of what one sequence needs to run."""
        return self.count_bytes(CacheSize(1, self.most_window_blocks))

    def divide(self, room: int) -> CacheSize:
        """Return the blocks of so many bytes: at least what one sequence takes, if they hold it."""
        full, window = self.block_bytes
        if not self.layout.window:
            return CacheSize(room // full, 0)
        if full == 0:
            num_window_blocks = room // window
            return CacheSize(max(self._blocks_for(num_window_blocks), self.max_blocks), num_window_blocks)
        share = self.kept_blocks * window
        num_window_blocks = room // (self._blocks_of_sequence * full + share) * self.kept_blocks
        num_window_blocks = min(num_window_blocks, max(room - self.max_blocks * full, 0) // window)
        num_window_blocks = max(num_window_blocks, self.most_window_blocks)
        num_blocks = max(room - num_window_blocks * window, 0) // full
        return CacheSize(num_blocks, num_window_blocks)

    def complete(self, num_blocks: int) -> CacheSize:
        """Return a number of blocks with the window blocks that belong to them."""
        if not self.layout.window:
            return CacheSize(num_blocks, 0)
        wanted = -(-num_blocks * self.kept_blocks // self._blocks_of_sequence)
        return CacheSize(num_blocks, max(wanted, self.most_window_blocks))

    @property
    def _blocks_of_sequence(self) -> int:
        """Blocks of the sequences for which memory is divided."""
        windows = _WINDOWS_OF_SEQUENCE if self.block_bytes[0] else _WINDOWS_OF_SEQUENCE_WITHOUT_BLOCKS
        tokens = min(windows * self.layout.window, self.max_model_len)
        return max(-(-tokens // self.block_size), self.kept_blocks)

    def _blocks_for(self, num_window_blocks: int) -> int:
        return num_window_blocks * self._blocks_of_sequence // max(self.kept_blocks, 1)
