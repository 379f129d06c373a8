# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV cache and host memory while steps run: no step waits for one, reads or writes what is copied.

The harness spoils what a copy will write until it is made, and sees that nobody writes what it reads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from blink.link.queue_pair import QueuePair
from blink.region.layout import FinishReason, Opcode, StepResult
from cached_prompts import VOCAB, check_restored, complete, prompt_of
from harness import Harness, Inbox, Step, expected_tokens, run_until_finished, running, small_config, submit, with_host
from random_load import play_episodes

MOST = 32  # blocks of an order
LONG = prompt_of(700)  # 88 blocks, of which 87 may be found


def beside(num_host_blocks: int, host_copies: int = 256) -> dict[str, int]:
    return with_host(num_host_blocks, host_copies, beside=True)


def idle(h: Harness, passes: int = 20) -> None:
    """Let an engine without work store what would be evicted next."""
    for _ in range(passes):
        assert h.step() == StepResult.IDLE


class Evicted(NamedTuple):
    """An engine that has stored a long prefix and evicted it, and decodes another prompt."""

    h: Harness
    pair: QueuePair
    inbox: Inbox
    decoder: int

    def tick(self, *, copy: bool = True) -> None:
        """Run a step; the sequence that decodes gets a token of it, whatever is copied."""
        before = len(self.inbox.tokens(self.decoder))
        self.h.step(copy=copy)
        self.inbox.drain(self.pair)
        assert len(self.inbox.tokens(self.decoder)) == before + 1

    def order(self) -> int:
        """Submit the prefix and let copies begin; return the sequence."""
        sequence = submit(self.h, self.pair, LONG, max_tokens=1)
        for _ in range(50):
            self.h.step(copy=False)
            self.inbox.drain(self.pair)
            if restores(self.h):
                return sequence
            self.h.copy()
        raise AssertionError("no copy is ordered for the sequence")

    def in_flight(self) -> int:
        return int(self.h.scheduler["host"]["num_ordered"])


def restores(h: Harness) -> bool:
    """Whether the order in flight is for a sequence that waits."""
    return int(h.scheduler["host"]["restored"]) > 0


@contextmanager
def evicted(num_blocks: int = 150) -> Iterator[Evicted]:
    config = small_config(max_num_batched_tokens=512)
    with running(config, num_blocks=num_blocks, max_model_len=720, **beside(600)) as h:
        pair, inbox = h.frontend(), Inbox()
        for start in (0, 30, 31, 32):
            complete(h, pair, prompt_of(700, start))
            idle(h)
        decoder = submit(h, pair, prompt_of(5, 3), max_tokens=200)
        h.step()
        inbox.drain(pair)
        yield Evicted(h, pair, inbox, decoder)


def test_an_evicted_prefix_is_restored() -> None:
    with running(small_config(), num_blocks=16, **beside(64)) as h:
        check_restored(h, lambda: idle(h))


def test_what_was_not_stored_when_it_is_evicted_is_computed_again() -> None:
    with running(small_config(), num_blocks=16, **beside(64)) as h:
        pair, inbox = h.frontend(), Inbox()
        for start in (0, 40, 41, 42):
            sequence = submit(h, pair, prompt_of(60, start), max_tokens=1)
            while inbox.finish(sequence) is None:
                h.step(copy=False)
                inbox.drain(pair)
        h.copy()
        assert complete(h, pair, prompt_of(60)) < 56


def test_others_get_a_token_in_each_step_while_a_prefix_is_restored() -> None:
    with evicted() as engine:
        restored = submit(engine.h, engine.pair, LONG, max_tokens=1)
        ticks = 0
        while engine.inbox.finish(restored) is None:
            engine.tick()
            ticks += 1
            assert engine.in_flight() <= MOST
        assert ticks <= 12, "three orders restore 87 blocks"
        assert engine.inbox.cached(restored) == 696 and engine.h.statistic("host_hits") == 696
        assert engine.inbox.tokens(restored) == expected_tokens(LONG, 1, VOCAB)


def test_a_sequence_waits_as_long_as_its_copies_take() -> None:
    with evicted() as engine:
        restored = engine.order()
        computed = engine.h.statistic("computed_tokens")
        for number in range(1, 40):
            engine.tick(copy=False)
            assert engine.h.statistic("computed_tokens") - computed == number, "nothing but the other's tokens"
        assert engine.h.statistic("host_hits") == 0
        engine.h.copy()
        run_until_finished(engine.h, engine.inbox, [engine.pair], [restored])
        assert engine.inbox.tokens(restored) == expected_tokens(LONG, 1, VOCAB)


def test_the_next_copies_begin_while_a_step_runs() -> None:
    with evicted() as engine:
        engine.order()
        engine.h.step(finish=False, copy=False)
        hits = [int(engine.h.scheduler["statistics"]["host_hits"])]
        for _ in range(2):
            engine.h.copy()
            assert engine.h.step(finish=False, copy=False) == StepResult.BUSY and restores(engine.h)
            hits.append(int(engine.h.scheduler["statistics"]["host_hits"]))
        assert [after - before for before, after in itertools.pairwise(hits)] == [MOST * 8, MOST * 8]


def test_prompts_with_other_prefixes_take_turns() -> None:
    with evicted(num_blocks=300) as engine:
        for start in (60, 61, 62, 63):
            complete(engine.h, engine.pair, prompt_of(700, start))
            for _ in range(20):
                engine.h.step()
        two = [submit(engine.h, engine.pair, prompt_of(700, start), max_tokens=1) for start in (0, 30)]
        while not restores(engine.h):
            engine.h.step(copy=False)
        restored = int(engine.h.scheduler["host"]["restored"])
        engine.h.step(finish=False, copy=False)
        engine.h.copy()
        assert engine.h.step(finish=False, copy=False) == StepResult.BUSY
        assert int(engine.h.scheduler["host"]["restored"]) not in (0, restored)
        run_until_finished(engine.h, engine.inbox, [engine.pair], two)
        for start, sequence in zip((0, 30), two, strict=True):
            assert engine.inbox.tokens(sequence) == expected_tokens(prompt_of(700, start), 1, VOCAB)


def test_two_prompts_with_one_prefix_restore_it_once() -> None:
    with evicted() as engine:
        pair = [submit(engine.h, engine.pair, [*LONG, number], max_tokens=1) for number in range(2)]
        run_until_finished(engine.h, engine.inbox, [engine.pair], pair)
        assert engine.h.statistic("host_hits") == 696
        for number, sequence in enumerate(pair):
            assert engine.inbox.tokens(sequence) == expected_tokens([*LONG, number], 1, VOCAB)


def test_a_cancelled_sequence_leaves_its_blocks_to_the_copies_in_flight() -> None:
    with evicted() as engine:
        restored = engine.order()
        ordered = engine.in_flight()
        engine.pair.cancel(restored)
        for _ in range(3):
            engine.tick(copy=False)
        assert engine.inbox.finish(restored) == FinishReason.ABORT and engine.in_flight() == ordered
        before = int(engine.h.scheduler["num_free_blocks"]) + int(engine.h.scheduler["num_evictable"])
        engine.h.copy()
        engine.h.step()
        after = int(engine.h.scheduler["num_free_blocks"]) + int(engine.h.scheduler["num_evictable"])
        assert after >= before + ordered - 1, "the decoder may have taken one"
        assert complete(engine.h, engine.pair, LONG) == 696


def test_what_is_evicted_while_it_is_stored_stays_until_it_is_read() -> None:
    with running(small_config(), num_blocks=16, **beside(64)) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, prompt_of(60), max_tokens=1)
        while inbox.finish(sequence) is None or not h.scheduler["host"]["num_ordered"]:
            h.step(copy=False)
            inbox.drain(pair)
        held = int(h.scheduler["host"]["num_ordered"])
        others = [submit(h, pair, prompt_of(60, start), max_tokens=1) for start in (40, 41, 42)]
        for _ in range(30):  # the harness sees that nobody writes what is read
            h.step(copy=False)
        h.copy()
        run_until_finished(h, inbox, [pair], others)
        h.step()
        assert held > 0 and h.statistic("host_blocks_stored") >= held
        complete(h, pair, prompt_of(60))


@pytest.mark.parametrize("stores", [True, False])
def test_a_reset_makes_the_copies_in_flight_void(stores: bool) -> None:
    with evicted() as engine:
        h = engine.h
        if stores:
            complete(h, engine.pair, prompt_of(700, 50))
            while not engine.in_flight():
                h.step(copy=False)
            assert not restores(h)
        else:
            engine.order()
        engine.pair.order(Opcode.RESET_PREFIX_CACHE)
        for _ in range(3):
            h.step(copy=False)
        stored = h.statistic("host_blocks_stored")
        assert h.statistic("num_host_blocks_used") == 0 and engine.in_flight() > 0
        h.copy()
        h.step(copy=False)
        assert h.statistic("num_host_blocks_used") == 0 and h.statistic("host_blocks_stored") == stored
        assert h.statistic("host_hits") == 0
        assert complete(h, engine.pair, prompt_of(700, 50)) == 0


def test_a_pause_is_in_effect_when_the_copies_are_over() -> None:
    with evicted() as engine:
        h = engine.h
        restored = engine.order()
        h.region.store_control("hold", 7)
        for _ in range(10):
            h.step(copy=False)
        assert h.region.control_word("held") == 0, "the host may take the memory away then"
        h.copy()
        for _ in range(3):
            h.step(copy=False)
        assert h.region.control_word("held") == 7 and engine.in_flight() == 0, "no order begins"
        h.region.store_control("hold", 0)
        run_until_finished(h, engine.inbox, [engine.pair], [restored])
        assert engine.inbox.tokens(restored) == expected_tokens(LONG, 1, VOCAB)


def test_stored_blocks_stay_the_next_to_be_evicted() -> None:
    """The blocks that were used last are there after a prompt has taken the room of those that were stored."""
    with running(small_config(max_num_batched_tokens=64), num_blocks=24, **beside(64)) as h:
        pair = h.frontend()
        complete(h, pair, prompt_of(60))
        idle(h)
        complete(h, pair, prompt_of(60, 40))
        idle(h)
        assert h.statistic("host_blocks_stored") >= 7
        complete(h, pair, prompt_of(60, 41))
        hits = h.statistic("host_hits")
        assert complete(h, pair, prompt_of(60, 40)) == 56 and h.statistic("host_hits") == hits


def size_host(seed: int) -> dict[str, int]:
    script = random.Random(seed)
    return beside(script.choice((3, 10, 60, 200)), script.choice((16, 64, 256)))


def test_random_load_reads_its_own_tokens_whenever_copies_are_made() -> None:
    counts = play_episodes(range(12), size_host)
    assert counts["host_hits"] > 0 and counts["host_blocks_stored"] > 0


@pytest.mark.long
def test_much_random_load_reads_its_own_tokens() -> None:
    play_episodes(range(100, 500), size_host)


@pytest.mark.parametrize(("lanes", "seeds"), [(3, 2), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (3, 8))])
def test_any_number_of_lanes_restores_the_same(lanes: int, seeds: int, lane_steps: Callable[[int], Step]) -> None:
    assert play_episodes(range(seeds), size_host, lane_steps(lanes)) == play_episodes(range(seeds), size_host)
