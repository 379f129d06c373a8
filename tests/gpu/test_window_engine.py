# SPDX-License-Identifier: Apache-2.0
"""The GPU engine frees window blocks: its scheduler decides, and captured steps read the tables that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import check, generate, make_prompts, save_model
from window_prefixes import check_hits_behind_freed_blocks, check_many_at_once, poison_window_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

# Windows in some layers and in all, sinks, softcaps, and a wide q/k norm.
NAMES = ("gemma2", "gemma3", "gpt_oss", "mistral", "olmo3")


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    return path


def test_hits_behind_freed_blocks_give_the_tokens_of_a_cold_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hits_behind_freed_blocks(model, "cuda", monkeypatch)


def test_prompts_at_once_give_their_tokens_though_some_are_preempted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many_at_once(model, "cuda", 60, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than the window, whose blocks hold NaN until they are written."""
    reference = save_model(name, tmp_path)
    poison_window_blocks(monkeypatch)
    prompts = make_prompts()
    check(reference, prompts, generate(tmp_path, prompts, "cuda"))
