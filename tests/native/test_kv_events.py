# SPDX-License-Identifier: Apache-2.0
"""Events of the prefix cache: a router's index that follows them knows what the scheduler's cache holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from blink.engine.kv_event_wire import to_wire
from blink.errors import OverloadedError
from blink.link.queue_pair import NO_HASH_ROOT
from blink.region.kv_events import CacheEvent, KvEventRing
from blink.region.layout import KvEventKind, Opcode, struct_dtype
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from cache_index import CacheIndex
from harness import Harness, Inbox, QueuePair, Step, run_until_finished, running, small_config, submission

VOCAB, BLOCK, RING = 97, 8, 32
NONE = 0xFFFFFFFF


class Followed:
    """A scheduler with events, and the index of a router that follows them."""

    def __init__(self, harness: Harness) -> None:
        self.h, self.index = harness, CacheIndex()
        harness.region.header["kv_event_root"] = list(harness.hash_root())
        self.ring = KvEventRing(harness.region)
        self.links = harness.state.array("events.links", struct_dtype("BlockLink"))

    def follow(self, limit: int = 1 << 30) -> list[CacheEvent]:
        """Let the router hear of at most `limit` events."""
        events = self.ring.take(limit)
        self.index.apply(to_wire(events, BLOCK))
        return events

    def catch_up(self) -> None:
        """Run passes until the router has heard of everything."""
        for _ in range(400):
            self.h.step()
            log, has_news = self.h.scheduler["events"], bool(self.follow())
            if not has_news and log["next"] == 0 and log["restart"] == 0 and log["written"] == log["published"]:
                return
        raise AssertionError("the events do not end")

    def blocks(self) -> dict[int, tuple[int, Any]]:
        """The blocks that the scheduler finds by a hash: hash, then place and tokens."""
        hashed = self.h.state.array("block_hashed", "u4").nonzero()[0].tolist()
        hashes = self.h.state.array("block_hashes", "u8").reshape(-1, 2)
        tokens = self.h.state.array("block_tokens", "i4").reshape(-1, BLOCK)
        return {int(hashes[b, 0]): (b, tuple(tokens[b].tolist())) for b in hashed}

    def find_start(self, block: int) -> int | None:
        """Return the block that the chain of another begins with; None: nobody can find it."""
        parents = self.h.state.array("block_parents", struct_dtype("Registration"))
        ids, hashed = self.h.state.array("block_ids", parents.dtype), self.h.state.array("block_hashed", "u4")
        while (parent := parents[block])["block"] != NONE:
            holders = ((ids == parent) & (hashed != 0)).nonzero()[0]
            if len(holders) == 0:
                return None
            block = int(holders[0])
        return block

    def check(self) -> None:
        """See that the index and the cache agree: on all blocks of chains that begin with the hash of no salt."""
        found = self.blocks()
        listed = {block_hash for block_hash, (block, _) in found.items() if self.links[block]["is_listed"]}
        assert self.index.blocks.keys() == listed
        for block_hash, (parent, tokens) in self.index.blocks.items():
            block, stored = found[block_hash]
            assert tokens == stored
            assert (parent is None) == (self.h.state.array("block_parents", "u4")[2 * block] == NONE)
        for block_hash, (block, _) in found.items():
            if (start := self.find_start(block)) is None:
                continue
            own, first = next((own, tokens) for own, (place, tokens) in found.items() if place == start)
            assert (own == low(self.h.hashes(first))) == (block_hash in self.index.blocks)


def low(hashes: bytes, block: int = 0) -> int:
    return int.from_bytes(hashes[block * 16 : block * 16 + 8], "little")


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


def finish(followed: Followed, pair: QueuePair, prompt: list[int], salt: bytes = b"", max_tokens: int = 2) -> None:
    inbox, h = Inbox(), followed.h
    entry = submission(prompt, (), h.hashes(prompt, salt))
    sequence = pair.submit(entry, SamplingParams(max_tokens=max_tokens))
    run_until_finished(h, inbox, [pair], [sequence])


def test_a_prompt_is_told_of_block_by_block_each_behind_its_parent() -> None:
    with running(small_config(), num_kv_events=RING) as h:
        followed, pair, prompt = Followed(h), h.frontend(), prompt_of(20)
        finish(followed, pair, prompt)
        first, second = (low(h.hashes(prompt), i) for i in range(2))
        assert followed.follow() == [
            (KvEventKind.STORED, first, None, tuple(prompt[:8])),
            (KvEventKind.STORED, second, first, tuple(prompt[8:16])),
        ]
        finish(followed, pair, prompt)
        assert followed.follow() == [], "what is there is not told of again"


def test_a_removal_and_a_reset_are_told_of() -> None:
    with running(small_config(), num_kv_events=RING, num_blocks=8) as h:
        followed, pair = Followed(h), h.frontend()
        finish(followed, pair, prompt_of(24))
        followed.catch_up()
        assert len(followed.index.blocks) == 3
        finish(followed, pair, prompt_of(60, 40))
        followed.catch_up()
        assert low(h.hashes(prompt_of(24)), 2) not in followed.index.blocks
        followed.check()
        pair.order(Opcode.RESET_PREFIX_CACHE)
        followed.catch_up()
        assert followed.index.num_clears == 1 and not followed.index.blocks


def test_a_router_that_hears_too_late_gets_all_blocks_anew() -> None:
    with running(small_config(), num_kv_events=8, num_blocks=16) as h:
        followed, pair = Followed(h), h.frontend()
        for start in range(12):  # nobody reads: the ring fills up, and evictions find no place in it
            finish(followed, pair, prompt_of(40, start))
        assert h.statistic("kv_event_restarts") > 0
        followed.catch_up()
        assert followed.index.num_clears > 0 and followed.index.blocks
        followed.check()


def test_nobody_is_told_of_what_has_a_salt_or_a_forged_start() -> None:
    with running(small_config(), num_kv_events=RING) as h:
        followed, pair, prompt = Followed(h), h.frontend(), prompt_of(20)
        finish(followed, pair, prompt, b"secret")
        forged = bytes(16) + h.hashes(prompt)[16:]
        pair.submit(submission(prompt, (), forged), SamplingParams(max_tokens=2))
        followed.catch_up()
        assert len(followed.blocks()) == 4 and not followed.index.blocks


def test_without_a_ring_nothing_is_noted() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        pair.submit(submission(prompt_of(20), (), h.hashes(prompt_of(20))), SamplingParams(max_tokens=2))
        for _ in range(10):
            h.step()
        assert h.scheduler["events"]["written"] == 0


class RandomRouter:
    """Random requests of a few families, some with a salt or with forged hashes, before a router that is often late."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.script = random.Random(seed)
        self.h, self.followed = harness, Followed(harness)
        self.pair, self.inbox = harness.frontend(), Inbox()
        self.live: list[int] = []
        self.num_events = 0

    def run(self, operations: int) -> None:
        for number in range(operations):
            self.script.choices((self.submit, self.step, self.listen, self.cancel, self.reset), (30, 50, 12, 3, 0.2))[
                0
            ]()
            if number % 200 == 199:
                self.followed.catch_up()
                self.followed.check()

    def submit(self) -> None:
        script = self.script
        prompt = prompt_of(script.randint(1, 50), script.randrange(8)) + [script.randrange(VOCAB)] * script.randint(
            0, 3
        )
        salt = script.choice((b"", b"", b"", b"one"))
        hashes, root = self.h.hashes(prompt, salt), self.h.hash_root(salt)
        if hashes and script.random() < 0.1:
            at = script.randrange(len(hashes) // 16)
            hashes = hashes[: at * 16] + script.randbytes(16) + hashes[at * 16 + 16 :]
        entry = submission(prompt, (), hashes, 0, script.choice((root, NO_HASH_ROOT)))
        try:
            self.live.append(self.pair.submit(entry, SamplingParams(max_tokens=script.randint(1, 12))))
        except OverloadedError:
            self.step()

    def step(self) -> None:
        self.h.step()
        self.inbox.drain(self.pair)

    def listen(self) -> None:
        self.num_events += len(self.followed.follow(self.script.choice((1, 5, 100))))

    def cancel(self) -> None:
        if self.live:
            self.pair.cancel(self.live[self.script.randrange(len(self.live))])

    def reset(self) -> None:
        self.pair.order(Opcode.RESET_PREFIX_CACHE)


def run_randomly(operations: int, seed: int, step: Step = lib.blink_step) -> None:
    with running(small_config(), num_kv_events=RING, num_blocks=24, step=step) as h:
        router = RandomRouter(h, seed)
        router.run(operations)
        assert router.num_events > operations / 20 and router.followed.index.num_clears > 0
        assert h.statistic("kv_event_restarts") > 0 and h.statistic("evicted_blocks") > 0


def test_an_index_that_follows_the_events_is_the_prefix_cache() -> None:
    run_randomly(2_000, 1)


@pytest.mark.parametrize("count", [250, pytest.param(600, marks=pytest.mark.long)])
def test_the_lanes_of_a_gpu_note_the_same(count: int, lane_steps: Callable[[int], Step]) -> None:
    run_randomly(count, 2, lane_steps(3))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_an_index_is_the_prefix_cache_after_many_operations(seed: int) -> None:
    run_randomly(25_000, seed)
