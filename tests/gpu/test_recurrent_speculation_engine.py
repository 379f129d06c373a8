# SPDX-License-Identifier: Apache-2.0
"""The GPU engine with recurrent layers that verify drafts, which it refuses today: tokens are those without drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from model_families import save_model
from recurrent_prefixes import draw_tokens, poison_states, start

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
SPECULATIVE = {
    "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
}
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43), 30.0)  # texts of few tokens repeat themselves
NUM_TOKENS, SEEDS = 90, range(6)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_states(monkeypatch)


@pytest.fixture(scope="module", params=["qwen3_5", "granite4-hybrid-dense"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    save_model(request.param, path)
    return path


def answer(llm: LLM, prompts: list[list[int]], temperature: float, **biases: Any) -> list[list[int]]:
    """Continue prompts, all at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=4, ignore_eos=True, **biases)
    return [[*each.outputs[0].token_ids] for each in llm.generate(prompts, params, use_tqdm=False)]


def both(path: Path, play: Callable[[LLM], Any]) -> tuple[Any, Any, dict[str, int]]:
    """Return what an engine without drafts gives and one with them, and what the latter counts."""
    with start(path, "cuda") as plain:
        expected = play(plain)
    with start(path, "cuda", **SPECULATIVE) as drafting:
        return expected, play(drafting), drafting.stats()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(model: Path, temperature: float) -> None:
    """One prompt after the other, each twice: the second time its states come from a snapshot."""
    prompts = [draw_tokens(random.Random(seed), 30 + 9 * seed) for seed in SEEDS]

    def play(llm: LLM) -> list[list[int]]:
        return [answer(llm, [prompt], temperature, logit_bias=FEW_TOKENS)[0] for prompt in prompts for _ in range(2)]

    expected, found, stats = both(model, play)
    assert found == expected
    assert stats["draft_tokens"] > stats["accepted_tokens"] > (30 if temperature == 0 else 0)
    assert stats["prefix_hits"] > 0


@pytest.mark.usefixtures("poisoned")
def test_rows_whose_states_lack_tokens_run_beside_prompts(model: Path) -> None:
    """Prompts of several steps, more than run at once: rows decode beside them right after drafts."""
    prompts = [draw_tokens(random.Random(seed), 20 + 37 * (seed % 4)) for seed in range(12)]
    expected, found, stats = both(model, lambda llm: answer(llm, prompts, 0.0, logit_bias=FEW_TOKENS))
    assert found == expected and stats["accepted_tokens"] > 10
