# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind the floors that benchmarks/gpu_decode.py prints."""

from __future__ import annotations

import dataclasses
import random
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from benchmark_programs import load_benchmark
from blink.formats.schemes import FP8_ROWS, Quantization
from blink.models.weights.source import read_spec

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "src" / "blink" / "models" / "configs"
BENCHMARKED = ROOT / "benchmarks" / "configs"


@pytest.fixture(scope="module")
def step_bytes() -> ModuleType:
    return load_benchmark("step_bytes")


def test_a_dense_step_reads_all_but_the_input_embeddings(step_bytes: ModuleType) -> None:
    spec = read_spec(CONFIGS / "llama-3-8b")
    layer = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    expected = 2 * (32 * layer + 128256 * 4096 + 4096)
    assert step_bytes.weight_bytes(spec, 1, 2) == step_bytes.weight_bytes(spec, 256, 2) == expected
    assert expected / 1e9 == pytest.approx(15.0, abs=0.05)  # benchmarks/results/2026-11-26-h100/fixed_rows.json


def test_a_step_reads_the_keys_and_values_of_every_context(step_bytes: ModuleType) -> None:
    spec = read_spec(CONFIGS / "llama-3-8b")
    assert step_bytes.cache_bytes(spec, 256, 400, 2) == 256 * 400 * 2 * 8 * 128 * 32 * 2


def test_a_step_reads_and_writes_the_states_of_recurrent_layers(step_bytes: ModuleType) -> None:
    spec = read_spec(ROOT / "benchmarks/configs/qwen3.6-35b-a3b")
    state = 32 * 128 * 128 * 4 + 4 * (2 * 16 * 128 + 32 * 128) * 2
    assert step_bytes.cache_bytes(spec, 32, 4096, 2) == 32 * (4096 * 2 * 2 * 256 * 10 * 2 + 2 * 30 * state)
    assert step_bytes.weight_bytes(spec, 1, 2) / 1e9 == pytest.approx(5.89, abs=0.01)  # of 69.3 GB


def test_a_layer_reads_no_more_keys_than_its_window(step_bytes: ModuleType) -> None:
    """Gemma 4 31B: 50 layers of 16 heads of 256 with a window of 1024, 10 of 4 heads of 512 without."""
    spec = read_spec(BENCHMARKED / "gemma-4-31b")
    for context in (300, 1024, 32768):
        numbers = 50 * min(context, 1024) * 2 * 16 * 256 + 10 * context * 2 * 4 * 512
        assert step_bytes.cache_bytes(spec, 7, context, 2) == 7 * numbers * 2


def test_keys_that_layers_share_are_read_by_each(step_bytes: ModuleType) -> None:
    """Gemma 4 E2B: one head of 256 in 28 layers, of 512 in 7; of all these 15 keep any."""
    spec = read_spec(BENCHMARKED / "gemma-4-e2b")
    assert step_bytes.cache_bytes(spec, 1, 400, 2) == 400 * 2 * (28 * 256 + 7 * 512) * 2
    assert step_bytes.cache_bytes(spec, 1, 4000, 2) == 2 * (28 * 512 * 256 + 7 * 4000 * 512) * 2


def test_of_per_layer_embeddings_a_step_reads_a_row_for_each_token(step_bytes: ModuleType) -> None:
    spec = read_spec(BENCHMARKED / "gemma-4-e2b")
    table = 262144 * 35 * 256
    assert step_bytes.weight_bytes(spec, 1, 2) == 2 * (spec.num_parameters - table + 35 * 256)
    assert step_bytes.weight_bytes(spec, 9, 2) - step_bytes.weight_bytes(spec, 1, 2) == 2 * 8 * 35 * 256


@pytest.mark.parametrize(("name", "billions"), [("gemma-4-26b-a4b", 3.8), ("gemma-4-31b", 30.7)])
def test_gemma_4_reads_what_its_tokens_take(step_bytes: ModuleType, name: str, billions: float) -> None:
    found = step_bytes.weight_bytes(read_spec(BENCHMARKED / name), 1, 2)
    assert found / 2e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_distinct_experts_are_those_of_random_choices(step_bytes: ModuleType, rows: int) -> None:
    spec = read_spec(CONFIGS / "qwen3-30b-a3b")
    chance, mlp = random.Random(rows), spec.mixture
    assert mlp is not None
    trials = [
        len({expert for _ in range(rows) for expert in chance.sample(range(mlp.experts), mlp.router.top_k)})
        for _ in range(300)
    ]
    assert step_bytes.distinct_experts(mlp, rows) == pytest.approx(statistics.mean(trials), rel=0.02)


def test_a_step_of_many_rows_reads_every_expert(step_bytes: ModuleType) -> None:
    spec = read_spec(CONFIGS / "qwen3-30b-a3b")
    everything = 2 * (spec.num_parameters - spec.vocab_size * spec.hidden_size)
    assert step_bytes.weight_bytes(spec, 100_000, 2) == pytest.approx(everything)
    chosen = 3 * 2048 * 768 * spec.num_layers * 2
    assert everything - step_bytes.weight_bytes(spec, 1, 2) == pytest.approx((128 - 8) * chosen)


def test_a_step_in_fp8_reads_matrices_of_one_byte(step_bytes: ModuleType) -> None:
    spec = read_spec(CONFIGS / "llama-3-8b")
    matrices = 32 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    head, norms = 128256 * 4096, 4096 + 32 * 2 * 4096
    assert step_bytes.weight_bytes(spec, 1, 2, "fp8") == matrices + head + 2 * norms
    stored = dataclasses.replace(spec, quantization=Quantization("awq"))
    assert step_bytes.weight_bytes(stored, 8, 2) == matrices * (0.5 + 4 / 128) + 2 * (head + norms)
    both = dataclasses.replace(spec, quantization=Quantization("packed", output=FP8_ROWS))
    assert step_bytes.weight_bytes(both, 8, 2) == matrices * (0.5 + 4 / 128) + head + 2 * norms
    assert step_bytes.weight_bytes(both, 8, 2, "fp8") == matrices + head + 2 * norms
    tied = dataclasses.replace(both, tie_embeddings=True)
    assert step_bytes.weight_bytes(tied, 8, 2) == step_bytes.weight_bytes(stored, 8, 2)
    moe = read_spec(CONFIGS / "qwen3-30b-a3b")
    chosen = 48 * 8 * 3 * 2048 * 768
    saved = step_bytes.weight_bytes(moe, 1, 2) - step_bytes.weight_bytes(moe, 1, 2, "fp8")
    assert saved == pytest.approx(chosen + 48 * 2048 * (2 * 4096 + 2 * 512) + 151936 * 2048)
