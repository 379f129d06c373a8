# SPDX-License-Identifier: Apache-2.0
"""An LLM that sleeps, wakes up and takes other weights: its tokens are those of one that was booted so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blink import LLM, SamplingParams
from blink.errors import BadRequestError, EngineUnavailableError
from blink.host.process import release_memory
from blink.request.source import TokensPrompt
from model_families import change_weights, save_model
from processes import wait_for

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 30, 31, 32] * 5)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "device": "cpu",
}


def generate(llm: LLM) -> list[int]:
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return list(output.outputs[0].token_ids)


def tokens_of(folder: Path) -> list[int]:
    with LLM(str(folder), **OPTIONS) as llm:
        return generate(llm)


def count_resident() -> int:
    release_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Site:
    """Models on disk, and the tokens of each."""

    def __init__(self, folder: Path) -> None:
        self.first = folder / "first"
        save_model("llama-3.1", self.first)
        self.second = change_weights(self.first, folder / "second")
        self.other = folder / "other"
        save_model("qwen3", self.other)
        self.damaged = folder / "damaged"
        shutil.copytree(self.second, self.damaged)
        for shard in self.damaged.glob("*.safetensors"):
            tensors = load_file(shard)
            kept = {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.down" not in name}
            save_file(kept or {"nothing": torch.zeros(1)}, shard)
        self.of_first, self.of_second = tokens_of(self.first), tokens_of(self.second)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("sleep"))
    assert site.of_first != site.of_second
    return site


@pytest.fixture
def llm(site: Site) -> Iterator[LLM]:
    with LLM(str(site.first), **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("level", [1, 2])
def test_an_llm_that_slept_says_the_same(site: Site, llm: LLM, level: int) -> None:
    assert generate(llm) == site.of_first
    for _ in range(2):
        llm.sleep(level)
        with pytest.raises(EngineUnavailableError, match="wake_up"):
            generate(llm)
        llm.wake_up()
        assert generate(llm) == site.of_first
    wait_for(lambda: llm.stats()["num_blocks_cached"] > 0, 30)  # statistics may come after the last token
    assert not llm.is_paused()


def test_it_wakes_up_by_parts(site: Site, llm: LLM) -> None:
    llm.sleep(2)
    llm.wake_up(["weights"])
    assert llm.is_paused()
    with pytest.raises(BadRequestError, match="KV cache sleeps"):
        llm.resume()
    llm.wake_up(["kv_cache"])
    assert generate(llm) == site.of_first


def test_sleep_frees_memory(llm: LLM) -> None:
    """All but a few blocks have been written: others take no memory."""
    prompts = [TokensPrompt(prompt_token_ids=[token] * 80) for token in range(5, 17)]
    llm.generate(prompts, SamplingParams(max_tokens=1))
    before = count_resident()
    llm.sleep(1)
    freed = before - count_resident()
    cache = 64 * 16 * 3 * 2 * 2 * 32 * 4  # blocks, tokens, layers, keys and values, heads, their size, bytes
    assert freed > cache // 2


def test_weights_are_replaced_and_cached_prefixes_with_them(site: Site, llm: LLM) -> None:
    assert generate(llm) == site.of_first
    llm.update_weights_from_disk(str(site.second))
    assert generate(llm) == site.of_second
    llm.update_weights_from_disk(str(site.first))
    assert generate(llm) == site.of_first


def test_weights_of_a_sleeper_are_those_that_it_had_or_was_given(site: Site, llm: LLM) -> None:
    llm.update_weights_from_disk(str(site.second))
    llm.sleep(2)
    llm.wake_up()
    assert generate(llm) == site.of_second
    llm.sleep(2)
    llm.update_weights_from_disk(str(site.first))
    llm.wake_up(["kv_cache"])
    assert generate(llm) == site.of_first


def test_a_pause_outlasts_an_update(site: Site, llm: LLM) -> None:
    llm.pause("keep")
    llm.update_weights_from_disk(str(site.second))
    assert llm.is_paused()
    llm.resume()
    assert generate(llm) == site.of_second


def test_another_models_weights_are_refused_before_anything_changes(site: Site, llm: LLM) -> None:
    for path in (site.other, site.first / "nowhere"):
        with pytest.raises(BadRequestError):
            llm.update_weights_from_disk(str(path))
        assert generate(llm) == site.of_first


def test_after_a_failed_update_the_weights_are_undefined_until_a_whole_one(site: Site, llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="no tensor"):
        llm.update_weights_from_disk(str(site.damaged))
    assert llm.is_paused()
    for call in (llm.resume, llm.wake_up):
        with pytest.raises(BadRequestError, match="weights are undefined"):
            call()
            llm.resume()
    with pytest.raises(EngineUnavailableError):
        generate(llm)
    llm.update_weights_from_disk(str(site.second))
    assert generate(llm) == site.of_second


@pytest.mark.parametrize("call", [lambda llm: llm.sleep(3), lambda llm: llm.wake_up(["x"]), lambda llm: llm.pause("x")])
def test_unknown_levels_tags_and_modes_are_refused(llm: LLM, call: Any) -> None:
    with pytest.raises(BadRequestError):
        call(llm)
    assert not llm.is_paused()


def test_an_engine_of_several_ranks_says_that_it_takes_no_other_weights(site: Site) -> None:
    with LLM(str(site.first), **OPTIONS, tensor_parallel_size=2) as ranks:
        for call in (ranks.sleep, lambda: ranks.update_weights_from_disk(str(site.second))):
            with pytest.raises(BadRequestError, match=r"docs/pause\.md says which engines do"):
                call()
        assert not ranks.is_paused() and generate(ranks) == site.of_first


@pytest.mark.parametrize("cycles", [8, pytest.param(100, marks=pytest.mark.long)])
def test_cycles_of_sleep_leave_memory_as_it_was(site: Site, llm: LLM, cycles: int) -> None:
    def cycle(level: int) -> None:
        llm.sleep(level)
        llm.wake_up()

    for level in (1, 2, 1, 2):
        cycle(level)
    before = count_resident()
    for index in range(cycles):
        cycle(1 + index % 2)
    assert count_resident() - before < 2 << 20
    assert generate(llm) == site.of_first
