# SPDX-License-Identifier: Apache-2.0
"""The GPU engine with recurrent layers: its prefix cache, whose snapshots the captured steps copy themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from model_families import FAMILIES, SMALL, save_model
from recurrent_prefixes import (
    BLOCK,
    check_a_long_answer,
    check_a_shared_prefix,
    check_many_at_once,
    check_prompts_around_a_snapshot,
    draw_tokens,
    lengthen,
    poison_states,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

# Heads that the decode kernel for Hopper takes.
WIDE: dict[str, Any] = {
    **SMALL,
    **FAMILIES["qwen3_5"],
    "architectures": ["Qwen3_5ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_states(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    save_model("qwen3_5", path)
    lengthen(path, 2048)
    return path


def test_prompts_that_end_around_a_snapshot_give_the_tokens_of_a_cold_run(model: Path) -> None:
    check_prompts_around_a_snapshot(model, "cuda")


def test_a_prefix_without_a_snapshot_gets_one(model: Path) -> None:
    check_a_shared_prefix(model, "cuda")


def test_prompts_at_once_give_their_tokens_though_some_are_preempted(model: Path) -> None:
    check_many_at_once(model, "cuda", 60)


def test_a_chat_goes_on_from_a_snapshot_of_its_answer(model: Path) -> None:
    check_a_long_answer(model, "cuda")


def test_a_mixture_of_experts_gives_the_tokens_of_a_cold_run(tmp_path: Path) -> None:
    save_model("qwen3_next", tmp_path)
    check_prompts_around_a_snapshot(tmp_path, "cuda")


@pytest.mark.parametrize("end", [63, 64, 65, 66, 74, 80, 81, 97])
def test_a_prompt_again_gives_the_same_logprobs_in_bf16(end: int, wide: LLM) -> None:
    """The second run computes the tail alone, in a step like the first one's last: of one token where it can be."""
    prompt = draw_tokens(random.Random(end), end)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    cold, warm = (wide.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens or 0, warm.num_cached_tokens) == (0, (end - 1) // BLOCK * BLOCK)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert logprobs_of(warm) == pytest.approx(logprobs_of(cold), abs=1e-3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("wide")
    (path / "config.json").write_text(json.dumps(WIDE))
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": BLOCK}
    sizes |= {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
    with pytest.MonkeyPatch.context() as patch:
        poison_states(patch)
        with LLM(str(path), device="cuda", **sizes) as llm:
            yield llm


def logprobs_of(output: Any) -> list[float]:
    tokens, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    return [position[token].logprob for token, position in zip(tokens, logprobs, strict=True)]
