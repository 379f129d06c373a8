# SPDX-License-Identifier: Apache-2.0
"""An LLM whose KV cache goes on in host memory: its answers are those of one with room for everything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM
from blink.config import EngineConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.engine.host_tier import runs_of
from blink.errors import ConfigError
from blink.kernels.layer_cache import LayerCache
from blink.kv_offload import OffloadConfig, read_transfer
from model_families import save_model
from returning_prompts import GREEDY, answer, make_batches

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 256,
}
MIB = 1 / 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("offload") / "model"
    save_model("llama-3.1", folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with LLM(model, num_gpu_blocks_override=1000, enable_prefix_caching=False, **OPTIONS) as llm:
        return [*answer(llm, 8)]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offloading_size": 64 * MIB},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                                "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20}}},
        {"enable_hierarchical_cache": True, "hicache_ratio": 4.0},
        {"kv_offloading_size": 64 * MIB, "tensor_parallel_size": 2},
        {"kv_offloading_size": 64 * MIB, "tensor_parallel_size": 4, "segment_ms": 0.01},
    ],
    ids=["vllm", "connector", "sglang", "ranks", "copied-heads"],
)  # fmt: skip
def test_answers_are_those_of_a_cache_with_room_for_all(
    model: str, expected: list[list[int]], options: dict[str, Any]
) -> None:
    """All prompts together take three times the KV cache."""
    with LLM(model, num_gpu_blocks_override=34, **OPTIONS, **options) as llm:
        assert [*answer(llm, 8)] == expected
        stats = llm.stats()
        assert stats["host_hits"] > 500 and stats["host_blocks_stored"] > 30
        assert stats["host_queries"] >= stats["host_hits"]


def test_a_restored_prefix_is_told_of_as_cached(model: str) -> None:
    with LLM(model, num_gpu_blocks_override=20, kv_offloading_size=64 * MIB, **OPTIONS) as llm:
        first, *others = make_batches(1)[0]
        llm.generate([first], GREEDY, use_tqdm=False)
        llm.generate(others, GREEDY, use_tqdm=False)
        (output,) = llm.generate([first], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 160
        assert llm.stats()["host_hits"] > 0


def test_an_engine_that_slept_restores_nothing_of_before(model: str, expected: list[list[int]]) -> None:
    with LLM(model, num_gpu_blocks_override=34, kv_offloading_size=64 * MIB, **OPTIONS) as llm:
        _ = [*answer(llm, 8)]
        llm.sleep(level=1)
        assert llm.stats()["num_host_blocks_used"] == 0
        llm.wake_up()
        assert [*answer(llm, 8)] == expected


def test_copies_of_one_direction_run_together_and_the_last_to_a_target_counts() -> None:
    runs = [*runs_of([(1, 10, 1), (2, 11, 1), (3, 10, 1), (4, 10, 0), (5, 11, 0), (6, 12, 1)])]
    assert [(out, sources.tolist(), targets.tolist()) for out, sources, targets in runs] == [
        (True, [3, 2], [10, 11]),
        (False, [10, 11], [4, 5]),
        (True, [6], [12]),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "OffloadingConnector alone"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"}, "kv_role"),
        ({"kv_connector": "OffloadingConnector"}, "cpu_bytes_to_use"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "a": 2}}, "'a'"),
        ({"kv_connector": "OffloadingConnector", "engine_id": "x"}, "engine_id"),
    ],
)
def test_connectors_that_are_not_there_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_transfer(values)


def test_two_options_for_the_same_are_refused() -> None:
    config = OffloadConfig(kv_offloading_size=1, enable_hierarchical_cache=True)
    with pytest.raises(ConfigError, match="leave one out"):
        config.host_bytes(1 << 20)
    assert OffloadConfig().host_bytes(1 << 20) == 0 and not OffloadConfig().is_on
    assert OffloadConfig(enable_hierarchical_cache=True).host_bytes(1 << 20) == 2 << 20
    assert OffloadConfig(enable_hierarchical_cache=True, hicache_size=3).host_bytes(1 << 20) == 3 * 10**9


def test_vllm_counts_all_ranks_and_sglang_each() -> None:
    assert OffloadConfig(kv_offloading_size=1).host_bytes(1 << 20, 4) == 1 << 30
    assert OffloadConfig(enable_hierarchical_cache=True).host_bytes(1 << 20, 4) == 8 << 20
    assert OffloadConfig(enable_hierarchical_cache=True, hicache_size=3).host_bytes(1 << 20, 4) == 12 * 10**9


def test_ranks_keep_as_many_blocks_as_one_in_the_same_memory(model: str) -> None:
    counts: list[int] = []
    for ranks in (1, 2):
        described = ModelConfig(model=model, max_model_len=256)
        offload, region = OffloadConfig(kv_offloading_size=MIB), f"offload-{os.getpid()}-{ranks}"
        sizes: dict[str, Any] = {"num_gpu_blocks_override": 34, "max_num_seqs": 4, "tensor_parallel_size": ranks}
        engine = CpuEngine(EngineConfig(model=described, device="cpu", region=region, kv_offload=offload, **sizes))
        counts.append(int(engine._geometry["num_host_blocks"]))
        engine._end_followers()
        engine.remove_region()
    assert counts[0] == counts[1] == (1 << 20) // (16 * 3 * 2 * 2 * 32 * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "without the prefix cache"),
        ({"kv_offloading_size": 1e-9}, "hold no block"),
        ({"kv_offloading_size": 1e6}, "do not fit"),
    ],
)
def test_what_host_memory_cannot_keep_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, num_gpu_blocks_override=34, **(OPTIONS | {"kv_offloading_size": 1.0} | options))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_models_that_keep_more_than_blocks_are_refused(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    with pytest.raises(ConfigError, match=r"window|recurrent"):
        LLM(str(tmp_path), kv_offloading_size=1.0, **OPTIONS)


def test_the_layers_of_a_group_are_seen_as_one_memory() -> None:
    memory = torch.randn(3, 2, 5, 16, 2, 8, dtype=torch.bfloat16)
    whole = LayerCache(memory[0]).view_group(3)
    assert torch.equal(whole, memory) and whole.data_ptr() == memory.data_ptr() and whole.is_contiguous()
