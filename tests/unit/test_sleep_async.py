# SPDX-License-Identifier: Apache-2.0
"""An AsyncLLM that is paused, sleeps and takes other weights by vLLM's names, and the gauge of its sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.api.observe.engine_metrics import engine_families
from blink.async_llm import AsyncLLM
from blink.errors import BadRequestError
from blink.request.source import TokensPrompt
from model_families import change_weights, save_model

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 30, 31, 32] * 5)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "device": "cpu",
}


class Site:
    """Two models on disk, and the tokens of each."""

    def __init__(self, folder: Path) -> None:
        self.first = folder / "first"
        save_model("llama-3.1", self.first)
        self.second = change_weights(self.first, folder / "second")
        self.of_first, self.of_second = (self._tokens(path) for path in (self.first, self.second))

    def _tokens(self, path: Path) -> list[int]:
        with LLM(str(path), **OPTIONS) as llm:
            (output,) = llm.generate([PROMPT], _params(30), use_tqdm=False)
        return list(output.outputs[0].token_ids)


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("sleep"))


def run(site: Site, play: Any, **options: Any) -> None:
    """Play a scene with an AsyncLLM of the first model."""

    async def scene() -> None:
        async with AsyncLLM(str(site.first), **(OPTIONS | options)) as llm:
            await asyncio.wait_for(play(llm), 100)

    asyncio.run(scene())


async def complete(llm: AsyncLLM, name: str, max_tokens: int = 30) -> tuple[list[int], str | None]:
    last = None
    async for output in llm.generate(PROMPT, _params(max_tokens), name):
        last = output.outputs[0]
    assert last is not None
    return list(last.token_ids), last.finish_reason


async def is_delayed(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that is not done after a while."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.3)
    assert not task.done()
    return task


def test_requests_wait_for_the_end_of_a_pause(site: Site) -> None:
    async def play(llm: AsyncLLM) -> None:
        assert not await llm.is_paused()
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused() and not await llm.is_sleeping()
        waiting = await is_delayed(complete(llm, "waits"))
        await llm.resume_generation()
        assert (await waiting)[0] == site.of_first

    run(site, play)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_running_stream_is_kept_or_ended(site: Site, ranks: int) -> None:
    async def play(llm: AsyncLLM) -> None:
        for mode in ("keep", "retract", "abort"):
            stream = llm.generate(PROMPT, _params(30), mode)
            await anext(stream)
            await llm.pause_generation(mode=mode)
            rest = asyncio.create_task(_drain(stream))
            if mode != "abort":
                await asyncio.sleep(0.2)
                assert not rest.done()
            await llm.resume_generation()
            tokens, reason = await rest
            assert reason == ("abort" if mode == "abort" else "length")
            assert tokens == site.of_first[: len(tokens)]

    run(site, play, tpot_target_ms=20, tensor_parallel_size=ranks)


async def _drain(stream: Any) -> tuple[list[int], str | None]:
    last = None
    async for output in stream:
        last = output.outputs[0]
    return list(last.token_ids), last.finish_reason  # type: ignore[union-attr]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_goes_on_with_what_waited(site: Site, level: int) -> None:
    async def play(llm: AsyncLLM) -> None:
        await llm.sleep(level=level)
        assert await llm.is_sleeping() and sleep_state(llm) == ("weights_offloaded", "discard_all")[level - 1]
        waiting = await is_delayed(complete(llm, "waits"))
        with pytest.raises(BadRequestError, match="wake it up first"):
            await llm.resume_generation()
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping() and not waiting.done() and sleep_state(llm) == "weights_offloaded"
        await llm.wake_up()
        assert not await llm.is_sleeping() and sleep_state(llm) == "awake"
        assert (await waiting)[0] == site.of_first

    run(site, play)


def sleep_state(llm: AsyncLLM) -> str:
    """Return the one state of which vllm:engine_sleep_state is 1."""
    stats = llm.stats()
    family = next(each for each in engine_families(stats, ()) if each.name == "vllm:engine_sleep_state")
    values = dict(zip((labels[0][1] for _, labels in family.samples), family.read(stats), strict=True))
    assert sorted(values.values()) == [0, 0, 1]
    return next(state for state, value in values.items() if value)


def test_running_requests_end_before_an_update(site: Site) -> None:
    async def play(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPT, _params(30), "before")
        await anext(stream)
        update = asyncio.create_task(llm.update_weights_from_disk(str(site.second)))
        assert (await _drain(stream))[0] == site.of_first
        await update
        assert (await complete(llm, "after"))[0] == site.of_second
        assert await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(site.first)}) == [None]
        assert (await complete(llm, "again"))[0] == site.of_first

    run(site, play)


def test_a_paused_engine_stays_paused_over_an_update(site: Site) -> None:
    async def play(llm: AsyncLLM) -> None:
        await llm.pause_generation(mode="retract")
        await llm.update_weights_from_disk(str(site.second))
        assert await llm.is_paused()
        await llm.resume_generation()
        assert (await complete(llm, "after"))[0] == site.of_second

    run(site, play)


def test_calls_that_are_not_there_are_refused(site: Site) -> None:
    async def play(llm: AsyncLLM) -> None:
        with pytest.raises(BadRequestError, match="no Python workers"):
            await llm.collective_rpc("execute_model")
        with pytest.raises(BadRequestError, match="mode is one of"):
            await llm.pause_generation(mode="stop")
        with pytest.raises(BadRequestError, match="level"):
            await llm.sleep(level=3)
        assert not await llm.is_paused()

    run(site, play)


def test_an_llm_has_the_calls_of_workers_too(site: Site) -> None:
    with LLM(str(site.first), **OPTIONS) as llm:
        assert llm.collective_rpc("sleep", args=(2,)) == [None]
        assert llm.is_sleeping()
        assert llm.collective_rpc("wake_up") == [None] and not llm.is_sleeping()
        llm.collective_rpc("reload_weights")
        (output,) = llm.generate([PROMPT], _params(30), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == site.of_first
