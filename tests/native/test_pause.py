# SPDX-License-Identifier: Apache-2.0
"""Pauses: nothing is launched, requests wait, and what was there goes on as each mode says."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from blink.errors import OverloadedError
from blink.link.queue_pair import QueuePair
from blink.region.layout import CqeKind, Drop, EngineState, FinishReason, Opcode, PauseMode, RejectCode, StepResult
from harness import Harness, Inbox, expected_tokens, run_until_finished, running, small_config, submit

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
MODES = [PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP, PauseMode.RETRACT]


class Served:
    """A scheduler with one frontend, and what that frontend has read."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.inbox = harness, Inbox()
        self.pair: QueuePair = harness.frontend()

    def step(self, count: int = 1) -> list[StepResult]:
        results: list[StepResult] = []
        for _ in range(count):
            self.inbox.drain(self.pair)
            results.append(self.harness.step())
        self.inbox.drain(self.pair)
        return results

    def pause(self, mode: PauseMode, drop: Drop = Drop.NOTHING, steps: int = 3) -> None:
        self.pair.order(Opcode.PAUSE, pause_mode=mode, pause_drop=drop)
        self.step(steps)

    def start(self, prompt: list[int] = PROMPT, max_tokens: int = 12) -> int:
        return submit(self.harness, self.pair, prompt, max_tokens=max_tokens, ignore_eos=True)

    def finish(self, *sequences: int) -> None:
        run_until_finished(self.harness, self.inbox, [self.pair], sequences)

    def is_paused(self) -> bool:
        return self.harness.engine_state == EngineState.PAUSED


@pytest.fixture
def served() -> Iterator[Served]:
    with running(small_config()) as harness:
        yield Served(harness)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT])
def test_a_kept_sequence_stands_still_and_goes_on_with_the_same_tokens(served: Served, mode: PauseMode) -> None:
    sequence = served.start()
    served.step(5)
    served.pause(mode)
    assert served.is_paused()
    before = served.inbox.tokens(sequence)
    assert 0 < len(before) < 12
    assert set(served.step(20)) == {StepResult.IDLE}
    assert served.inbox.tokens(sequence) == before
    served.pair.order(Opcode.RESUME)
    served.finish(sequence)
    assert served.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, served.harness.vocab_size)


def test_a_pause_is_in_effect_after_the_step_in_flight(served: Served) -> None:
    served.start()
    served.step(3)
    assert served.harness.step(finish=False) == StepResult.LAUNCHED
    served.pair.order(Opcode.PAUSE, pause_mode=PauseMode.KEEP, pause_drop=Drop.NOTHING)
    assert served.harness.step(finish=False) == StepResult.BUSY and not served.is_paused()
    served.harness.finish()
    assert served.harness.step() == StepResult.IDLE and served.is_paused()


def test_a_retracted_sequence_gives_its_blocks_back(served: Served) -> None:
    sequence = served.start()
    served.step(5)
    served.pause(PauseMode.KEEP)
    assert served.harness.statistic("num_blocks_used") > 0
    served.pause(PauseMode.RETRACT, Drop.PREFIX_CACHE)
    statistics = [served.harness.statistic(name) for name in ("num_blocks_used", "num_blocks_cached", "num_running")]
    assert statistics == [0, 0, 0]
    served.pair.order(Opcode.RESUME)
    served.finish(sequence)
    assert served.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, served.harness.vocab_size)


def test_abort_ends_running_and_waiting_sequences_and_keeps_later_ones(served: Served) -> None:
    old = [served.start() for _ in range(6)]  # two wait: four run at once
    served.step(4)
    served.pause(PauseMode.ABORT)
    assert [served.inbox.finish(sequence) for sequence in old] == [FinishReason.ABORT] * 6
    late = served.start()
    served.step(5)
    assert served.inbox.tokens(late) == [] and served.inbox.finish(late) is None
    served.pair.order(Opcode.RESUME)
    served.finish(late)
    assert served.inbox.tokens(late) == expected_tokens(PROMPT, 12, served.harness.vocab_size)


def test_wait_lets_running_sequences_end_and_admits_none(served: Served) -> None:
    running_one = served.start()
    served.step(2)
    served.pair.order(Opcode.PAUSE, pause_mode=PauseMode.WAIT, pause_drop=Drop.NOTHING)
    served.step()
    late = served.start()
    served.step(3)
    assert not served.is_paused()
    served.finish(running_one)
    served.step(2)
    assert served.is_paused() and served.inbox.cached(late) is None
    assert served.inbox.finish(running_one) == FinishReason.LENGTH
    served.pair.order(Opcode.RESUME)
    served.finish(late)


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_of_an_idle_engine_holds_what_comes(served: Served, mode: PauseMode) -> None:
    served.pause(mode)
    assert served.is_paused() and served.harness.statistic("num_pauses") == 1
    sequence = served.start(max_tokens=2)
    assert set(served.step(5)) == {StepResult.IDLE}
    assert served.harness.statistic("num_waiting") == 1
    served.pair.order(Opcode.RESUME)
    served.finish(sequence)
    assert served.harness.engine_state == EngineState.READY


def test_the_queue_of_a_paused_engine_has_its_bound(served: Served) -> None:
    served.pause(PauseMode.KEEP)
    for _ in range(8):
        served.start()
    with pytest.raises(OverloadedError):
        served.start()


def test_a_pause_can_empty_the_prefix_cache(served: Served) -> None:
    served.finish(served.start(max_tokens=1))
    again = served.start(max_tokens=1)
    served.finish(again)
    assert served.inbox.cached(again) == 8
    served.pause(PauseMode.KEEP, Drop.PREFIX_CACHE)
    served.pair.order(Opcode.RESUME)
    last = served.start(max_tokens=1)
    served.finish(last)
    assert served.inbox.cached(last) == 0


def test_a_cancelled_sequence_ends_while_the_engine_is_paused(served: Served) -> None:
    sequence = served.start()
    served.step(4)
    served.pause(PauseMode.KEEP)
    served.pair.cancel(sequence)
    served.step(2)
    assert served.inbox.finish(sequence) == FinishReason.ABORT and served.is_paused()


def test_a_resume_before_the_pause_began_counts_it_as_taken_back(served: Served) -> None:
    served.start()
    served.step(3)
    served.pair.order(Opcode.PAUSE, pause_mode=PauseMode.WAIT, pause_drop=Drop.NOTHING)
    served.pair.order(Opcode.RESUME)
    served.step(2)
    assert served.harness.statistic("num_pauses") == 1 and not served.is_paused()


def test_a_lost_frontend_takes_its_sequences_with_it(served: Served) -> None:
    served.start()
    served.step(3)
    served.pause(PauseMode.KEEP)
    for _ in range(4):
        served.harness.step(2000)
    assert served.harness.statistic("num_running") == 0 and served.is_paused()


@pytest.mark.parametrize(("mode", "drop"), [(0, 0), (5, 0), (1, 2), (1 << 31, 0)])
def test_an_unknown_pause_is_refused(served: Served, mode: int, drop: int) -> None:
    served.pair.order(Opcode.PAUSE, pause_mode=mode, pause_drop=drop)
    served.harness.step()
    assert served.pair._link.drain(served.pair.head, served.pair._completions_at, 4) == 1
    assert not served.is_paused()
    assert served.pair._completions[0]["kind"] == CqeKind.REJECTED
    assert served.pair._completions[0]["token"] == RejectCode.OPCODE


@pytest.mark.parametrize("seed", range(6))
def test_random_pauses_change_no_token(seed: int) -> None:
    """Few blocks, so that sequences are preempted too; each step the integrity of the state is checked."""
    rng = random.Random(seed)
    with running(small_config(), num_blocks=14) as harness:
        served, held, asked = Served(harness), 0, {}
        for _ in range(400):
            dice = rng.random()
            if dice < 0.15 and len([s for s in asked if served.inbox.finish(s) is None]) < 6:
                prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 30))]
                asked[served.start(prompt, max_tokens=9)] = prompt
            elif dice < 0.22:
                served.pair.order(
                    Opcode.PAUSE, pause_mode=rng.choice(MODES), pause_drop=rng.choice([Drop.NOTHING, Drop.PREFIX_CACHE])
                )
            elif dice < 0.34:
                served.pair.order(Opcode.RESUME)
            elif dice < 0.42:
                held = 0 if held else rng.randrange(1, 1 << 32)
                harness.region.store_control("hold_drop", rng.choice([*Drop]))
                harness.region.store_control("hold", held)
            served.step()
        harness.region.store_control("hold", 0)
        served.pair.order(Opcode.RESUME)
        served.finish(*asked)
        reasons = {served.inbox.finish(sequence) for sequence in asked}
        assert reasons == {FinishReason.LENGTH, FinishReason.ABORT}
        for sequence, prompt in asked.items():
            wanted = expected_tokens(prompt, 9, harness.vocab_size)
            tokens = served.inbox.tokens(sequence)
            assert tokens == wanted[: len(tokens)]
            assert len(tokens) == 9 or served.inbox.finish(sequence) == FinishReason.ABORT


class TestHold:
    """The engine's host holds the scheduler by words of its own."""

    def hold(self, served: Served, number: int, drop: Drop = Drop.NOTHING) -> None:
        served.harness.region.store_control("hold_drop", drop)
        served.harness.region.store_control("hold", number)
        served.step(3)

    def held(self, served: Served) -> int:
        return served.harness.region.control_word("held")

    def test_it_is_acknowledged_and_outlasts_a_resume(self, served: Served) -> None:
        sequence = served.start()
        served.step(4)
        self.hold(served, 7)
        assert self.held(served) == 7 and served.is_paused()
        served.pair.order(Opcode.RESUME)
        assert set(served.step(5)) == {StepResult.IDLE} and served.is_paused()
        self.hold(served, 0)
        assert self.held(served) == 0
        served.finish(sequence)
        assert served.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, served.harness.vocab_size)

    def test_the_frontends_pause_outlasts_a_hold(self, served: Served) -> None:
        sequence = served.start()
        served.pause(PauseMode.KEEP)
        self.hold(served, 1)
        self.hold(served, 0)
        assert served.is_paused()
        served.pair.order(Opcode.RESUME)
        served.finish(sequence)

    def test_waiting_for_running_sequences_goes_on_after_a_hold(self, served: Served) -> None:
        sequence = served.start()
        served.step(3)
        served.pair.order(Opcode.PAUSE, pause_mode=PauseMode.WAIT, pause_drop=Drop.NOTHING)
        served.step()
        self.hold(served, 1)
        assert served.is_paused()
        self.hold(served, 0)
        assert not served.is_paused()
        served.finish(sequence)
        served.step(2)
        assert served.is_paused()

    def test_it_takes_all_kv_away(self, served: Served) -> None:
        sequence = served.start()
        served.step(5)
        self.hold(served, 1, Drop.KV_CACHE)
        assert [served.harness.statistic(f"num_blocks_{name}") for name in ("used", "cached")] == [0, 0]
        served.harness.kv[:] = -1  # the memory is another one
        served.harness.histories[:] = 0
        self.hold(served, 0)
        served.finish(sequence)
        assert served.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, served.harness.vocab_size)

    def test_an_engine_that_drains_lifts_a_pause_and_serves_what_is_there(self, served: Served) -> None:
        sequence = served.start()
        served.pause(PauseMode.KEEP)
        served.harness.region.store_control("drain", 1)
        served.finish(sequence)
        served.step(2)
        assert served.inbox.finish(sequence) == FinishReason.LENGTH
        assert served.harness.engine_state == EngineState.DRAINED

    def test_an_engine_that_drains_while_held_ends_what_is_there(self, served: Served) -> None:
        sequence = served.start()
        served.step(3)
        self.hold(served, 1)
        served.harness.region.store_control("drain", 1)
        served.step(3)
        assert served.inbox.finish(sequence) == FinishReason.ABORT
        assert served.harness.engine_state == EngineState.DRAINED

    def test_a_scheduler_leaves_its_device_for_the_hold_in_effect_and_for_no_other(self, served: Served) -> None:
        sequence, region = served.start(), served.harness.region
        served.step(4)
        region.store_control("leave", 7)
        assert StepResult.AWAY not in served.step(2)  # nothing is held yet
        self.hold(served, 7)
        assert set(served.step(3)) == {StepResult.AWAY} and served.is_paused()
        self.hold(served, 8)
        assert set(served.step(3)) == {StepResult.IDLE}
        region.store_control("leave", 8)
        assert served.step() == [StepResult.AWAY]
        region.store_control("leave", 0)
        assert served.step() == [StepResult.IDLE]
        self.hold(served, 0)
        served.finish(sequence)
        assert served.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, served.harness.vocab_size)

    def test_it_leaves_no_step_in_flight_behind(self, served: Served) -> None:
        served.start()
        served.step(3)
        assert served.harness.step(finish=False) == StepResult.LAUNCHED
        for name in ("leave", "hold"):
            served.harness.region.store_control(name, 7)
        assert {served.harness.step(finish=False) for _ in range(3)} == {StepResult.BUSY}
        served.harness.finish()
        assert served.harness.step() == StepResult.AWAY and self.held(served) == 7
