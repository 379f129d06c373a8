# SPDX-License-Identifier: Apache-2.0
"""Adapters on the GPU engine: as if merged, many in a batch, loaded while others decode, with a stopped host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blink import LLM, LoRARequest, SamplingParams
from blink.adapters.protocol import ask_load
from blink.link.client import EngineClient
from blink.link.queue_pair import KvOrigin
from blink.link.variant import BASE_MODEL, ModelVariant
from blink.region.layout import CqeKind
from engine_process import CONFIG, connect, run_engine_process, stopped
from lora_adapters import find_targets, merge, write_adapter
from lora_calls import PROMPTS, Models, generate, make_prompts
from model_families import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ADAPTERS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    yield Models(tmp_path_factory.mktemp("lora"))


def open_llm(path: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 400}
    sizes |= {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}
    return LLM(model=str(path), **(sizes | options))


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3", "gemma3", "phi3-short", "opt", "qwen3_moe", "glm4_moe"])
def test_an_adapter_is_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    model, prompts = save_model(name, tmp_path / "base"), make_prompts(16)
    adapter = write_adapter(tmp_path / "adapter", find_targets(model), seed=7, use_rslora=True)
    merge(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    with open_llm(tmp_path / "base", enable_lora=True) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
        assert generate(llm, prompts) == plain
    with open_llm(tmp_path / "merged") as llm:
        assert found == generate(llm, prompts)
    assert found != plain


def test_eight_adapters_and_none_in_one_batch_are_each_as_alone(models: Models) -> None:
    with open_llm(models.base, enable_lora=True, max_loras=NUM_ADAPTERS) as llm:
        loras = [None, *models.adapters]
        alone = [generate(llm, [prompt], lora)[0] for prompt, lora in zip(PROMPTS, loras, strict=True)]
        llm.reset_prefix_cache()
        assert generate(llm, PROMPTS, loras) == alone
        assert len({tuple(generate(llm, PROMPTS[:1], lora)[0]) for lora in loras}) == 1 + NUM_ADAPTERS
    with models.open(max_loras=NUM_ADAPTERS) as llm:
        assert generate(llm, PROMPTS, loras) == alone, "the CPU engine gives other tokens"


def test_adapters_are_loaded_and_replaced_while_others_decode(models: Models) -> None:
    with models.open(max_loras=NUM_ADAPTERS) as llm:
        wanted = [generate(llm, PROMPTS[:2], lora) for lora in models.adapters]
        steady = generate(llm, PROMPTS)
    with open_llm(models.base, enable_lora=True, max_loras=2) as llm:
        generate(llm, PROMPTS[:1])
        found: list[list[list[int]]] = []
        other = threading.Thread(target=lambda: found.extend(generate(llm, PROMPTS) for _ in range(20)))
        other.start()
        for index in [0, 1, 2, 3, 0, 4, 5, 1, 6, 7, 7, 0]:
            assert generate(llm, PROMPTS[:2], models.adapters[index]) == wanted[index]
        other.join()
        assert found == [steady] * 20


def test_more_adapters_than_the_gpu_has_slots_take_turns(models: Models) -> None:
    loras = [None, *models.adapters]
    with models.open(max_loras=NUM_ADAPTERS) as llm:
        wanted = generate(llm, PROMPTS, loras)
    with open_llm(models.base, enable_lora=True, max_loras=3, max_cpu_loras=NUM_ADAPTERS) as llm:
        assert [generate(llm, PROMPTS, loras) for _ in range(4)] == [wanted] * 4
        for order in (range(9), range(8, -1, -1), range(0, 9, 2)):
            assert [generate(llm, [PROMPTS[index]], loras[index])[0] for index in order] == [wanted[i] for i in order]


def decode(client: EngineClient, variants: list[ModelVariant]) -> list[list[int]]:
    """Return the tokens of one sequence of each variant, all at once."""
    params, prompt = (
        SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0),
        np.arange(100, 140, dtype=np.int32),
    )
    tokens: dict[int, list[int]] = {
        client.submit(prompt, params, seed=1, origin=KvOrigin(variant=each)): [] for each in variants
    }
    num_open, deadline = len(tokens), time.monotonic() + 30
    while num_open:
        assert time.monotonic() < deadline, f"{num_open} sequences did not end"
        assert client.tick() is None
        for completion in client.drain():
            if completion["kind"] == CqeKind.TOKEN:
                tokens[int(completion["sequence"])].append(int(completion["token"]))
            num_open -= int(completion["finish_reason"] != 0)
        time.sleep(0.001)
    return list(tokens.values())


def decode_alone(client: EngineClient, variants: list[ModelVariant]) -> list[list[int]]:
    """Return the tokens of one sequence of each variant, one after the other."""
    return [decode(client, [each])[0] for each in variants]


# In 16 bits, a row's bits depend on whether another one of its step has an adapter.
@pytest.mark.parametrize(("dtype", "run"), [("float32", decode), ("bfloat16", decode_alone)])
@pytest.mark.parametrize("num_adapters", [2, 5])
def test_adapters_serve_while_the_host_process_is_stopped(
    num_adapters: int, dtype: str, run: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = CONFIG
    hidden, kv_size = sizes["hidden_size"], sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes = {"q_proj": (hidden, hidden), "v_proj": (kv_size, hidden)}
    targets = {
        f"model.layers.{layer}.self_attn.{name}": torch.empty(shape)
        for layer in range(sizes["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    paths = [write_adapter(tmp_path / f"adapter-{seed}", targets, seed=seed) for seed in range(num_adapters)]
    flags = ["--num-gpu-blocks-override=4096", "--max-num-seqs=16", "--enable-lora", "--max-loras=2"]
    flags += [f"--dtype={dtype}", f"--max-cpu-loras={num_adapters}"]
    with run_engine_process(tmp_path, *flags) as (process, region):
        client = connect(region, process)
        held = [ask_load(region, str(path)) for path in paths]
        variants = [BASE_MODEL, *(each.variant for each in held)]
        before = run(client, variants)
        assert len({tuple(tokens) for tokens in before}) == 1 + num_adapters
        with stopped(process):  # beyond two, the scheduler has adapters copied to the GPU again each time
            for _ in range(3):
                assert run(client, variants) == before
        client.close()
