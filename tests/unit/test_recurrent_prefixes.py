# SPDX-License-Identifier: Apache-2.0
"""A recurrent model gives the tokens of a cold run whatever the prefix cache holds, through a whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import save_model
from recurrent_prefixes import check_a_shared_prefix, check_many_at_once, check_prompts_around_a_snapshot, poison_states


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_states(monkeypatch)


@pytest.fixture(scope="module", params=["qwen3_5", "granite4-hybrid-dense"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    save_model(request.param, path)
    return path


def test_prompts_that_end_around_a_snapshot_give_the_tokens_of_a_cold_run(model: Path) -> None:
    check_prompts_around_a_snapshot(model, "cpu")


def test_a_prefix_without_a_snapshot_gets_one(model: Path) -> None:
    check_a_shared_prefix(model, "cpu")


@pytest.mark.parametrize("count", [7, pytest.param(12, marks=pytest.mark.long)])
def test_prompts_at_once_give_their_tokens_though_some_are_preempted(model: Path, count: int) -> None:
    check_many_at_once(model, "cpu", count)
