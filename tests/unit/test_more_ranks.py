# SPDX-License-Identifier: Apache-2.0
"""Four and eight ranks that share a model of each family: the tokens and logprobs of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import FAMILIES, check, generate, make_prompts, save_model
from wide_families import widen

pytestmark = pytest.mark.timeout(300)

PROMPTS = [*make_prompts()[2:5], make_prompts()[7]]
_FAST = {("qwen3_next", 4), ("glm4_moe", 4), ("llama-3.1", 8)}
CASES = [(name, ranks) for name in FAMILIES for ranks in (4, 8)]


@pytest.mark.parametrize(
    ("name", "ranks"), [case if case in _FAST else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_more_ranks_give_the_tokens_and_logprobs_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    model = save_model(name, tmp_path, **widen(name, ranks))
    check(model, PROMPTS, generate(tmp_path, PROMPTS, "cpu", tensor_parallel_size=ranks, cpu_threads=ranks))
