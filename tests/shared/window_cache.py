# SPDX-License-Identifier: Apache-2.0
"""A model of the prefix cache with window blocks, for one sequence at a time: what it finds, keeps and evicts.

It knows blocks by the tokens up to their end. It shares no code or data with the scheduler.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Key = tuple[int, ...]  # a prompt's tokens up to the end of a block
ROLLBACK = 16


@dataclass
class Pool:
    """Blocks that nobody uses: free ones, and cached ones, the least recently used first."""

    free: int
    cached: dict[Key, None] = field(default_factory=dict)


@dataclass
class Run:
    """A sequence that runs: of each of its blocks the key that the cache knows it by."""

    blocks: list[Key | None]
    windows: list[Key | None]
    freed: int  # leading window blocks that it has given back
    computed: int
    chain: int  # registration of its last registered block
    registered: int


class WindowCache:
    """The cache of an engine that runs one sequence after the other."""

    def __init__(self, size: int, num_blocks: int, num_windows: int, window: int, step_tokens: int) -> None:
        """size: of a block in tokens; step_tokens: of the longest chunk of a prompt."""
        self.size, self.window, self.step_tokens = size, window, step_tokens
        self.full, self.windowed = Pool(num_blocks), Pool(num_windows)
        self.known: dict[Key, tuple[int, int]] = {}  # registered blocks: their registration, and that of the one before
        self.have_window: set[Key] = set()  # of these, those whose window block is there
        self.registrations = 0
        self.cuts = self.evicted_windows = 0

    def play(self, prompt: list[int], max_tokens: int) -> int:
        """Run a sequence to its end; return how many tokens of its prompt were found."""
        keys = [tuple(prompt[:end]) for end in range(self.size, len(prompt) + 1, self.size)]
        run = self._begin(keys[: (len(prompt) - 1) // self.size])
        found, tokens = run.computed, len(prompt)
        for _ in range(max_tokens):
            while run.computed < tokens:
                self._advance(run, keys, min(tokens - run.computed, self.step_tokens))
            tokens += 1
        self._end(run)
        return found

    def reset(self) -> None:
        """Forget all; nothing runs."""
        for pool in (self.full, self.windowed):
            pool.free += len(pool.cached)
            pool.cached.clear()
        self.known.clear()
        self.have_window.clear()

    def _behind(self, position: int) -> int:
        """Return how many leading blocks lie behind the window of a query at a position."""
        return max(position - self.window + 1, 0) // self.size

    def _begin(self, keys: list[Key]) -> Run:
        chain = 0
        hit = 0
        for key in keys:
            if key not in self.known or self.known[key][1] != chain:
                break
            chain = self.known[key][0]
            hit += 1
        usable = next(n for n in range(hit, -1, -1) if self.have_window >= {*keys[self._behind(n * self.size) : n]})
        self.cuts += usable < hit
        first = self._behind(usable * self.size)
        for pool, taken in ((self.full, keys[:usable]), (self.windowed, keys[first:usable])):
            for key in taken:
                del pool.cached[key]
        chain = self.known[keys[usable - 1]][0] if usable else 0
        windows: list[Key | None] = [None] * first + [*keys[first:usable]]
        return Run([*keys[:usable]], windows, first, usable * self.size, chain, usable)

    def _advance(self, run: Run, keys: list[Key], chunk: int) -> None:
        """Compute some more tokens."""
        missing = -(-(run.computed + chunk) // self.size) - len(run.blocks)
        self._evict(missing, run)
        self.full.free -= missing
        self.windowed.free -= missing
        run.blocks += [None] * missing
        run.windows += [None] * missing
        run.computed += chunk
        while run.registered < min(len(keys), run.computed // self.size):
            self._register(run, keys[run.registered])
        end = self._behind(max(run.computed - ROLLBACK, 0))
        if end > run.freed:
            self._release(self.windowed, run.windows[run.freed : end])
            run.freed = end
        self._evict(1, run)

    def _register(self, run: Run, key: Key) -> None:
        """Let the cache know the run's next block, or go on from its equal."""
        at = run.registered
        run.registered += 1
        if key in self.known and self.known[key][1] == run.chain:
            run.chain = self.known[key][0]
        else:
            if key in self.known:  # it follows a block that is no longer known
                del self.full.cached[key]
                self.full.free += 1
                self._forget(key, run)
            self.registrations += 1
            self.known[key] = self.registrations, run.chain
            run.chain, run.blocks[at] = self.registrations, key
        if key not in self.have_window:
            self.have_window.add(key)
            run.windows[at] = key

    def _forget(self, key: Key, run: Run) -> None:
        del self.known[key]
        if key not in self.have_window:
            return
        self.have_window.remove(key)
        if key in self.windowed.cached:
            del self.windowed.cached[key]
            self.windowed.free += 1
        else:  # the run's own, which nobody finds any more
            run.windows[run.windows.index(key)] = None

    def _evict(self, wanted: int, run: Run) -> None:
        """Make so many blocks of each pool free, as far as cached ones are there."""
        while self.full.free < wanted and self.full.cached:
            key = next(iter(self.full.cached))
            del self.full.cached[key]
            self.full.free += 1
            self._forget(key, run)
        while self.windowed.free < wanted and self.windowed.cached:
            key = next(iter(self.windowed.cached))
            del self.windowed.cached[key]
            self.have_window.remove(key)
            self.windowed.free += 1
            self.evicted_windows += 1

    def _release(self, pool: Pool, blocks: list[Key | None]) -> None:
        for key in reversed(blocks):
            if key is None:
                pool.free += 1
            else:
                pool.cached[key] = None

    def _end(self, run: Run) -> None:
        self._release(self.windowed, run.windows[run.freed :])
        self._release(self.full, run.blocks)


def draw_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Return prompts of which many share prefixes of all lengths."""
    roots = [[rng.randrange(97) for _ in range(longest)] for _ in range(4)]
    prompts: list[list[int]] = []
    for _ in range(count):
        root = rng.choice(roots)[: rng.randrange(1, longest)]
        prompts.append([*root, *(rng.randrange(97) for _ in range(rng.randrange(1, longest - len(root) + 1)))])
        if rng.random() < 0.5:  # the whole root again
            prompts[-1] = root
    return prompts
