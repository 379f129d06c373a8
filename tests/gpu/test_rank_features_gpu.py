# SPDX-License-Identifier: Apache-2.0
"""What goes on beside steps on GPUs that share a model: adapters, blocks in host memory, events, pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, AsyncLLM, LoRARequest, SamplingParams
from blink.request.source import TokensPrompt
from gpu_counts import TWO_GPUS, on_ranks
from kv_router import check_predictions
from lora_adapters import find_targets, merge, write_adapter
from lora_calls import PROMPTS, Models, generate, make_prompts
from model_families import save_model
from returning_prompts import answer
from wide_families import widen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    TWO_GPUS,
]

NUM_ADAPTERS = 8
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    yield Models(tmp_path_factory.mktemp("lora"))


def open_llm(path: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 400}
    return LLM(model=str(path), **(OPTIONS | sizes | options))


@on_ranks
@pytest.mark.parametrize("name", ["llama-3.1", "gemma3", "olmo2", "qwen3_moe"])
def test_an_adapter_is_as_if_it_were_merged(name: str, ranks: int, tmp_path: Path) -> None:
    changes = widen(name, ranks) | {"intermediate_size": 128}  # in which each rank's part is wide enough for tiles
    model, prompts = save_model(name, tmp_path / "base", **changes), make_prompts(16)
    adapter = write_adapter(tmp_path / "adapter", find_targets(model), seed=7, use_rslora=True)
    merge(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    with open_llm(tmp_path / "base", enable_lora=True, tensor_parallel_size=ranks) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
        assert generate(llm, prompts) == plain
    with open_llm(tmp_path / "merged") as llm:
        assert found == generate(llm, prompts)
    assert found != plain


def test_adapters_in_one_batch_and_in_turns_are_each_as_alone(models: Models) -> None:
    loras = [None, *models.adapters]
    with models.open(max_loras=NUM_ADAPTERS) as llm:
        wanted = generate(llm, PROMPTS, loras)
        alone = [generate(llm, PROMPTS[:2], lora) for lora in models.adapters]
    with open_llm(models.base, enable_lora=True, max_loras=NUM_ADAPTERS, tensor_parallel_size=2) as llm:
        assert generate(llm, PROMPTS, loras) == wanted, "the CPU engine gives other tokens"
    with open_llm(models.base, enable_lora=True, max_loras=2, tensor_parallel_size=2) as llm:
        for index in [0, 1, 2, 3, 0, 4, 5, 1, 6, 7, 7, 0]:
            assert generate(llm, PROMPTS[:2], models.adapters[index]) == alone[index]


@on_ranks
def test_blocks_in_host_memory_give_the_answers_of_a_cache_with_room_for_all(ranks: int, tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path, **widen("llama-3.1", ranks))
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, **OPTIONS}
    with LLM(str(tmp_path), num_gpu_blocks_override=1000, **sizes) as llm:
        expected = [*answer(llm)]
    sizes |= {"num_gpu_blocks_override": 34, "kv_offloading_size": 1 / 16, "tensor_parallel_size": ranks}
    with LLM(str(tmp_path), **sizes) as llm:
        assert [*answer(llm)] == expected
        assert llm.stats()["host_hits"] > 500


def test_events_tell_a_router_each_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama-3.1", tmp_path)
    check_predictions(tmp_path, "cuda", monkeypatch, 30, tensor_parallel_size=2)


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_pause_changes_no_token(mode: str, tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path)
    prompt = TokensPrompt(prompt_token_ids=PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 200, "tensor_parallel_size": 2, **OPTIONS}

    async def run(llm: AsyncLLM, pauses: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(prompt, params, f"{pauses} pauses"):
            tokens = list(output.outputs[0].token_ids)
            if pauses > 0:
                pauses -= 1
                await llm.pause_generation(mode=mode)
                assert await llm.is_paused()
                await llm.resume_generation()
        return tokens

    async def play() -> None:
        async with AsyncLLM(str(tmp_path), **sizes) as llm:
            whole = await run(llm, 0)
            assert len(whole) == 200
            assert await run(llm, 5) == whole

    asyncio.run(asyncio.wait_for(play(), 200))
