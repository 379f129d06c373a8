# SPDX-License-Identifier: Apache-2.0
"""The lock-step of ranks: sums in their order, whole plans alone, and a bound for every wait within a step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.engine.plan_words import PlanKind, PlanWords, StepPlanWords
from blink.engine.ranks import Followers
from blink.kernels.all_reduce import RankLostError
from blink.kernels.batch import Batch
from blink.kernels.cpu import all_reduce
from blink.kernels.cpu.all_reduce import CpuRanks, Exchange
from blink.kernels.layer_cache import KvCache
from blink.models.weights.loader import open_model
from blink.plan.site import Bucket
from blink.runner.run import Runner
from model_families import make_prompts, save_model
from rank_models import drive_ranks, run_to_end

pytestmark = pytest.mark.timeout(120)

PLAN = StepPlanWords(PlanKind.SEGMENT, 300, 7, False, True, 2, 5)
PROMPTS = make_prompts()[3:6]


def on_ranks(size: int, work: Callable[[CpuRanks], object], timeout: float = 30.0) -> list[object]:
    """Run something on each rank's thread; return what it returned or raised."""
    exchange = Exchange(size, timeout)

    def run(rank: int) -> object:
        try:
            return work(CpuRanks(exchange, rank))
        except RankLostError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_sums_are_in_the_order_of_ranks_and_the_same_on_each() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 0.5)]
    found = on_ranks(4, lambda ranks: ranks.add(parts[ranks.rank]).item())
    assert found == [0.5] * 4  # the 1.0 is lost in 1e8; in any order that cancels first it is not
    assert [part.item() for part in parts] == [1e8, 1.0, -1e8, 0.5]


def test_only_the_first_rank_gets_what_is_joined() -> None:
    widths = (3, 3, 1)
    found = on_ranks(3, lambda ranks: ranks.join(torch.full((2, widths[ranks.rank]), float(ranks.rank))))
    first, *others = found
    assert isinstance(first, Tensor) and first.tolist() == [[0, 0, 0, 1, 1, 1, 2]] * 2
    assert [part.numel() for part in others if isinstance(part, Tensor)] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_delayed_ranks_change_nothing(seed: int) -> None:
    """Ranks come at random times; each sum is of the tensors of its own exchange."""

    def work(ranks: CpuRanks) -> list[float]:
        rng, found = random.Random(10 * seed + ranks.rank), list[float]()
        for number in range(200):
            if rng.random() < 0.2:
                time.sleep(0.0005)
            found.append(ranks.add(torch.tensor([float(number * 10**ranks.rank)])).item())
        return found

    assert on_ranks(3, work) == [[number * 111.0 for number in range(200)]] * 3


def test_a_rank_that_does_not_come_is_named_to_all_others_in_time() -> None:
    def work(ranks: CpuRanks) -> Tensor | None:
        ranks.add(torch.zeros(1))
        return None if ranks.rank == 2 else ranks.add(torch.zeros(1))

    start = time.monotonic()
    first, second, stopped, last = on_ranks(4, work, timeout=2.0)
    assert time.monotonic() - start < 60
    assert stopped is None
    for error in (first, second, last):
        assert isinstance(error, RankLostError) and error.rank == 2 and "did not come within 2 s" in str(error)


def test_a_process_that_was_stopped_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by minutes while one rank waits for another, as after SIGSTOP."""
    jumped, clock = threading.Event(), time.monotonic

    def work(ranks: CpuRanks) -> float:
        if ranks.rank:
            assert jumped.wait(60)
            time.sleep(0.05)
        return ranks.add(torch.ones(1)).item()

    def now() -> float:
        if threading.current_thread() is not threading.main_thread():
            jumped.set()
            return clock() + (300 if random.random() < 0.5 else 0)
        return clock()

    monkeypatch.setattr(all_reduce.time, "monotonic", now)
    assert on_ranks(2, work, timeout=5.0) == [2.0, 2.0]


def test_a_plan_is_read_whole_or_not_at_all() -> None:
    words = PlanWords(3)
    words.write(1, 4, PLAN)
    assert words.read(1, 4) == PLAN
    assert words.read(1, 5) is None and words.read(1, 3) is None
    assert words.read(2, 4) is None, "each rank has words of its own"
    next_plan = StepPlanWords(PlanKind.WHOLE, 301, 8, True, False, 0, 0)
    new = PlanWords(3)
    new.write(1, 5, next_plan)
    for count in range(len(PLAN)):
        torn = PlanWords(3)
        torn.words[:] = words.words
        torn.words[1, :count] = new.words[1, :count]
        assert torn.read(1, 5) is None
        assert torn.read(1, 4) == (PLAN if count == 0 else None)
    assert new.read(1, 5) == next_plan


def test_a_follower_never_runs_a_torn_plan_and_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama-3.1", tmp_path)
    driver, followers = drive_ranks(tmp_path, 2, timeout=1.0)
    write = PlanWords.write

    def tear(self: PlanWords, rank: int, step: int, plan: StepPlanWords) -> None:
        last = self.words[rank, -1]
        write(self, rank, step, plan)
        self.words[rank, -1] = last

    monkeypatch.setattr(PlanWords, "write", tear)
    with pytest.raises(RankLostError, match="rank 1 did not come") as caught:
        run_to_end(driver, PROMPTS)
    assert caught.value.rank == 1
    followers.end()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_fails_ends_the_step_of_all(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama-3.1", tmp_path)
    driver, followers = drive_ranks(tmp_path, 4, timeout=60.0)
    run, calls = Runner.forward, list[int]()

    def break_once(self: Runner, batch: Batch, kv_cache: KvCache, size: Bucket, **kinds: bool) -> None:
        if self._ranks.rank == rank:
            calls.append(rank)
            if len(calls) == 2:
                raise ValueError("broken")
        run(self, batch, kv_cache, size, **kinds)

    monkeypatch.setattr(Runner, "forward", break_once)
    start = time.monotonic()
    with pytest.raises((RankLostError, ValueError), match="broken"):
        run_to_end(driver, PROMPTS)
    followers.end()
    for thread in followers.threads:
        thread.join(30)
        assert not thread.is_alive()
    assert time.monotonic() - start < 50, "nobody waited for the bound"


def test_followers_that_are_not_given_memory_end(tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path)
    source = open_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"), torch.float32)
    followers = Followers(2, source.split(2), 30.0)
    followers.end()
    assert not any(thread.is_alive() for thread in followers.threads)
