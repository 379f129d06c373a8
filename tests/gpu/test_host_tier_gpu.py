# SPDX-License-Identifier: Apache-2.0
"""A GPU's KV cache that goes on in host memory: answers are those of a cache with room for everything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from model_families import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 256,
}
MIB = 1 / 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("host") / "model"
    save_model("llama-3.1", folder)
    return str(folder)


def make_batches() -> list[list[list[int]]]:
    """Prompts in turns: beginnings that come again after others, and ends of their own."""
    script = random.Random(3)
    starts = [[script.randrange(5, 100) for _ in range(160)] for _ in range(6)]
    ends = ([script.randrange(5, 100) for _ in range(10)] for _ in range(1000))
    return [[[*start, *next(ends)] for start in script.sample(starts, 3)] for _ in range(20)]


def answer(llm: LLM) -> Iterator[list[int]]:
    for batch in make_batches():
        for output in llm.generate(batch, GREEDY, use_tqdm=False):
            yield list(output.outputs[0].token_ids)


@pytest.mark.parametrize("host_mib", [64, 2])  # room for all of it, and evictions of host blocks
def test_answers_are_those_of_a_cache_with_room_for_all(model: str, host_mib: int) -> None:
    """All prompts together take three times the KV cache."""
    with LLM(model, num_gpu_blocks_override=1000, **OPTIONS) as llm:
        expected = [*answer(llm)]
    with LLM(model, num_gpu_blocks_override=34, kv_offloading_size=host_mib * MIB, **OPTIONS) as llm:
        assert [*answer(llm)] == expected
        stats = llm.stats()
        assert stats["host_hits"] > 0 and stats["host_blocks_stored"] > 30


def test_long_answers_beside_restored_prefixes_are_those_of_a_cache_with_room_for_all(model: str) -> None:
    """Prefixes come back while others decode, in windows of launches that end meanwhile."""
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    rounds = [[*batch, [5 + number]] for number, batch in enumerate(make_batches()[:8])]
    params = [GREEDY, GREEDY, GREEDY, long]
    answers: list[list[list[int]]] = []
    for options in ({"num_gpu_blocks_override": 1000}, {"num_gpu_blocks_override": 44, "kv_offloading_size": 64 * MIB}):
        with LLM(model, **OPTIONS, **options) as llm:
            found = [llm.generate(prompts, params, use_tqdm=False) for prompts in rounds]
            answers.append([list(output.outputs[0].token_ids) for outputs in found for output in outputs])
            hits = llm.stats()["host_hits"]
    assert answers[0] == answers[1] and hits > 0
