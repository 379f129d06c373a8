# SPDX-License-Identifier: Apache-2.0
"""An LLM that takes weights tensor by tensor: its tokens are those of one that was booted with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from blink.async_llm import AsyncLLM
from blink.errors import BadRequestError
from blink.link.model_orders import (
    ask_begin,
    ask_broadcast,
    ask_commit,
    ask_join,
    ask_leave,
    ask_share,
    send_tensors,
)
from blink.offline.tensors import stream_tensors
from blink.request.source import TokensPrompt
from model_families import change_weights, save_model
from ports import free_port
from weight_trainer import GROUP, describe_weights, list_weights, start_trainer

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 30, 31, 32] * 5)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "device": "cpu",
}
_SAFETENSORS = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


def generate(llm: LLM) -> list[int]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


class Site:
    """Two models on disk, and the tokens of each."""

    def __init__(self, folder: Path) -> None:
        self.first = folder / "first"
        save_model("llama-3.1", self.first)
        self.second = change_weights(self.first, folder / "second")
        self.weights = list_weights(self.second)
        self.of_first, self.of_second = (self._tokens(path) for path in (self.first, self.second))

    def _tokens(self, path: Path) -> list[int]:
        with LLM(str(path), **OPTIONS) as llm:
            return generate(llm)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("tensors"))
    assert site.of_first != site.of_second
    return site


@pytest.fixture
def llm(site: Site) -> Iterator[LLM]:
    with LLM(str(site.first), **OPTIONS) as llm:
        yield llm


def region_of(llm: LLM) -> str:
    return llm._engine.config.engine.region


def test_tensors_give_the_weights_of_a_boot_and_outlast_sleep(site: Site, llm: LLM) -> None:
    assert generate(llm) == site.of_first
    llm.update_weights_from_tensor(site.weights)
    assert generate(llm) == site.of_second
    llm.sleep(2)
    llm.wake_up()
    assert generate(llm) == site.of_second
    llm.update_weights_from_disk(str(site.first))
    assert generate(llm) == site.of_first


def test_some_tensors_leave_the_others_as_they_are(site: Site, llm: LLM) -> None:
    pairs = [*site.weights.items()]
    llm.update_weights_from_tensor(pairs[::2])
    between = generate(llm)
    llm.update_weights_from_tensor(pairs[1::2])
    assert generate(llm) == site.of_second
    assert between not in (site.of_first, site.of_second)


def test_parts_between_begin_and_commit_are_one_update(site: Site, llm: LLM) -> None:
    region, pairs = region_of(llm), [*site.weights.items()]
    ask_begin(region)
    for part in (pairs[:3], pairs[3:]):
        llm.update_weights_from_tensor(part)
        assert generate(llm) == site.of_first
    ask_commit(region, clears_cache=True)
    assert generate(llm) == site.of_second
    with pytest.raises(BadRequestError, match="No tensor has come"):
        ask_commit(region, clears_cache=True)


def test_a_begin_drops_what_a_trainer_that_was_killed_has_sent(site: Site, llm: LLM) -> None:
    region = region_of(llm)
    ask_begin(region)
    llm.update_weights_from_tensor({name: one * 0 for name, one in site.weights.items()})
    ask_begin(region)
    llm.update_weights_from_tensor([*site.weights.items()][:1])
    ask_begin(region)
    llm.update_weights_from_tensor(site.weights)
    ask_commit(region, clears_cache=True)
    assert generate(llm) == site.of_second


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_stream_that_ends_early_leaves_the_weights_whole(site: Site, llm: LLM, share: float) -> None:
    whole = b"".join(stream_tensors(site.weights))
    with pytest.raises(BadRequestError, match="ended early"):
        send_tensors(region_of(llm), [whole[: int(share * len(whole))]])
    assert generate(llm) == site.of_first
    llm.update_weights_from_tensor(site.weights)
    assert generate(llm) == site.of_second


def test_a_tensor_that_does_not_fit_is_refused_and_nothing_changes(site: Site, llm: LLM) -> None:
    name, tensor = next(iter(site.weights.items()))
    wrong = {**site.weights, name: torch.zeros(3, *tensor.shape)}
    for tensors, reason in ((wrong, "has shape"), ({"x": tensor}, "no tensor 'x'")):
        with pytest.raises(BadRequestError, match=reason):
            llm.update_weights_from_tensor(tensors)
        assert generate(llm) == site.of_first


def test_an_async_llm_goes_on_with_the_tensors(site: Site) -> None:
    async def scene() -> list[int]:
        async with AsyncLLM(str(site.first), **OPTIONS) as llm:
            await llm.update_weights_from_tensor(site.weights)
            return [[*one.outputs[0].token_ids] async for one in llm.generate(PROMPT, PARAMS, "a")][-1]

    assert asyncio.run(asyncio.wait_for(scene(), 100)) == site.of_second


def test_a_trainers_broadcast_gives_its_weights(site: Site, llm: LLM) -> None:
    region, port, told = region_of(llm), free_port(), describe_weights(site.second)
    types = [_SAFETENSORS[one] for one in told["dtypes"]]
    tensors = [*zip(told["names"], types, told["shapes"], strict=True)]
    trainer = start_trainer(site.second, port)
    try:
        ask_join(region, GROUP, "127.0.0.1", port, 1, 2)
        with pytest.raises(BadRequestError, match="no tensor 'x'"):
            ask_broadcast(region, GROUP, [("x", "F32", [1]), *tensors])  # before the trainer's first is taken
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(ask_broadcast, region, GROUP, tensors)
            assert generate(llm) == site.of_first  # which serves meanwhile
            assert not taken.result(100)
        ask_commit(region, clears_cache=True)
        assert generate(llm) == site.of_second
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
    ask_leave(region, GROUP)
    with pytest.raises(BadRequestError, match="no group"):
        ask_broadcast(region, GROUP, tensors)


def test_a_trainer_that_is_killed_while_it_broadcasts_leaves_the_weights_whole(site: Site, llm: LLM) -> None:
    region, port, told = region_of(llm), free_port(), describe_weights(site.second)
    types = [_SAFETENSORS[one] for one in told["dtypes"]]
    trainer = start_trainer(site.second, port, 5)
    try:
        ask_join(region, GROUP, "127.0.0.1", port, 1, 2)
        with pytest.raises(BadRequestError, match="broadcast of"):
            ask_broadcast(region, GROUP, [*zip(told["names"], types, told["shapes"], strict=True)])
    finally:
        trainer.kill()
        trainer.wait(60)
    assert generate(llm) == site.of_first


def test_an_engine_on_a_cpu_refuses_nccl_and_cuda_ipc_by_name(site: Site, llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="nccl needs an engine on a GPU"):
        ask_join(region_of(llm), GROUP, "127.0.0.1", 1, 1, 2, "nccl")
    with pytest.raises(BadRequestError, match="CUDA IPC needs an engine on the trainer's GPU"):
        ask_share(region_of(llm), [("x", "F32", [1])], [{}])
    assert generate(llm) == site.of_first
