# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family against transformers with the same weights, through a whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from blink.models.families import FAMILIES as KNOWN
from blink.models.weights.source import read_spec
from model_families import FAMILIES, continue_greedily, generate, make_prompts, save_model


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    assert read_spec(tmp_path).num_parameters == model.num_parameters()
    prompts = make_prompts()
    alone, together = generate(tmp_path, prompts, "cpu")
    assert together == alone
    assert alone == [continue_greedily(model, *pair) for pair in zip(prompts, alone, strict=True)]


def test_every_family_has_a_model_here() -> None:
    assert {config["model_type"] for config in FAMILIES.values()} == set(KNOWN)
