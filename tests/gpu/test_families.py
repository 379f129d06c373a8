# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family on the GPU, against transformers on the CPU with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import FAMILIES, check, generate, make_prompts, save_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    prompts = make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cuda"))
