# SPDX-License-Identifier: Apache-2.0
"""Many adapters on one model: together, evicted, reloaded, and in less memory than all of them take."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from blink import LoRARequest
from blink.adapters.client import AdapterClient
from blink.config import EngineConfig, ModelConfig
from blink.engine.boot import create_engine
from blink.errors import BadRequestError, ConfigError
from blink.lora_config import LoraConfig
from lora_adapters import write_adapter
from lora_calls import GREEDY, PROMPTS, Models, generate
from processes import resident_mib


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    yield Models(tmp_path_factory.mktemp("lora"))


def test_eight_adapters_and_none_in_one_batch_are_each_as_alone(models: Models) -> None:
    with models.open(max_loras=8) as llm:
        loras = [None, *models.adapters]
        alone = [generate(llm, [prompt], lora)[0] for prompt, lora in zip(PROMPTS, loras, strict=True)]
        llm.reset_prefix_cache()
        before = llm.stats()["num_steps"]
        assert generate(llm, PROMPTS, loras) == alone
        assert llm.stats()["num_steps"] - before < 4 * GREEDY.max_tokens  # pyright: ignore[reportOperatorIssue]
        assert len({tuple(generate(llm, PROMPTS[:1], lora)[0]) for lora in loras}) == 9
        outputs = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=models.adapters[2])
        assert outputs[0].lora_request is outputs[0].outputs[0].lora_request is models.adapters[2]


def test_more_adapters_than_memory_holds_take_turns(models: Models) -> None:
    with models.open(max_loras=8) as llm:
        wanted = [generate(llm, PROMPTS, lora) for lora in models.adapters]
    with models.open(max_loras=1, max_cpu_loras=2) as llm:
        for index in [0, 1, 2, 3, 0, 4, 5, 1, 6, 7, 7, 0]:
            assert generate(llm, PROMPTS, models.adapters[index]) == wanted[index]
        two = [models.adapters[index % 2 + 3] for index in range(len(PROMPTS))]  # one slot: the one after the other
        found = generate(llm, PROMPTS, two)
        assert found == [wanted[index % 2 + 3][index] for index in range(len(PROMPTS))]


def test_a_reload_in_place_takes_the_new_files_and_meets_no_old_blocks(models: Models) -> None:
    with models.open(max_loras=2) as llm:
        wanted = [generate(llm, PROMPTS, models.adapters[index]) for index in (1, 2)]
        lora = models.request(1, "same")
        assert generate(llm, PROMPTS, lora) == wanted[0]
        again = models.request(2, "same")
        assert generate(llm, PROMPTS, again) == wanted[0], "files are read again only when that is asked for"
        anew = LoRARequest("same", 3, again.lora_path, load_inplace=True)
        assert generate(llm, PROMPTS, anew) == wanted[1]
        assert generate(llm, PROMPTS, again) == wanted[1]


def test_equal_content_shares_cached_blocks_and_no_other_does(models: Models) -> None:
    with models.open(max_loras=2) as llm:

        def cached(lora: LoRARequest | None) -> int | None:
            return llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False, lora_request=lora)[0].num_cached_tokens

        first, copy, other = models.adapters[1], models.request(1, "copy"), models.adapters[2]
        assert [cached(each) for each in (None, None, first, copy, other, other)] == [0, 16, 0, 16, 0, 16]


def test_a_damaged_adapter_touches_nothing_else(models: Models) -> None:
    with models.open(max_loras=1) as llm:
        wanted = generate(llm, PROMPTS, models.adapters[0])
        wrong = write_adapter(models.folder / "wrong", models.targets, seed=1, rank=4, r=5)
        with pytest.raises(BadRequestError, match=r"lora_A.weight has the shape \[4, 96\], and must have \[5, 96\]"):
            generate(llm, PROMPTS, LoRARequest("wrong", 1, str(wrong)))
        with pytest.raises(BadRequestError, match=r"r is 17, and --max-lora-rank 16"):
            generate(llm, PROMPTS, LoRARequest("wrong", 1, str(write_adapter(wrong, models.targets, seed=1, rank=17))))
        with pytest.raises(BadRequestError, match=r"there is no|cannot be read"):
            generate(llm, PROMPTS, LoRARequest("wrong", 1, "/nowhere\0"))
        assert generate(llm, PROMPTS, models.adapters[0]) == wanted
        with pytest.raises(BadRequestError, match="one for each prompt"):
            generate(llm, PROMPTS, [models.adapters[0]])


def test_an_engine_without_adapters_refuses_them(models: Models) -> None:
    with models.open(enable_lora=False) as llm, pytest.raises(BadRequestError, match="--enable-lora"):
        generate(llm, PROMPTS, models.adapters[0])


def test_drafts_are_verified_with_the_adapter(models: Models) -> None:
    with models.open(max_loras=2) as llm:
        wanted = generate(llm, PROMPTS, models.adapters[3])
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    with models.open(max_loras=2, speculative_config=drafts) as llm:
        assert generate(llm, PROMPTS, models.adapters[3]) == wanted
        assert llm.stats()["num_drafts"] > 0


def test_what_takes_no_adapters_yet_says_so(models: Models) -> None:
    plain = EngineConfig(
        model=ModelConfig(model=str(models.base)), lora=LoraConfig(enable_lora=True), region="lora", device="cpu"
    )
    with pytest.raises(ConfigError, match="other machines"):
        create_engine(replace(plain, rdma_listen="127.0.0.1:0"))
    with pytest.raises(ConfigError, match="--deterministic"):
        create_engine(replace(plain, deterministic=True))
    with pytest.raises(ConfigError, match="must be at least --max-loras"):
        _ = LoraConfig(enable_lora=True, max_loras=4, max_cpu_loras=2).num_adapters


def _load_and_unload(models: Models, count: int) -> float:
    """Load and unload adapters, two of them anew each time; return by how many MiB this process grew."""
    with models.open(max_loras=2) as llm:
        wanted = generate(llm, PROMPTS, models.adapters[7])
        adapters = AdapterClient(llm._engine.config.engine.region, llm._client)
        before = 0.0
        for turn in range(count):
            llm._await_engine()
            for lora in models.adapters[:3]:
                adapters.hold(lora.lora_path, anew=True)
            if turn == count // 4:
                gc.collect()
                before = resident_mib(os.getpid())
        gc.collect()
        grown = resident_mib(os.getpid()) - before
        assert generate(llm, PROMPTS, models.adapters[7]) == wanted
        return grown


def test_loads_leave_memory_as_it_was(models: Models) -> None:
    assert _load_and_unload(models, 12) < 30


@pytest.mark.long
def test_a_thousand_loads_leave_memory_as_it_was(models: Models) -> None:
    """An adapter of these takes 0.1 MB: what stayed of each would be seen."""
    assert _load_and_unload(models, 400) < 30
