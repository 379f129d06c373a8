# SPDX-License-Identifier: Apache-2.0
"""Models whose window blocks are freed give the tokens of a run that keeps all, whatever the prefix cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blink.kernels.batch import Param
from model_driver import Driver, load
from model_families import FAMILIES, NUM_NEW, make_prompts, save_model
from window_prefixes import check_hits_behind_freed_blocks, check_many_at_once

_OFTEN = ("gemma3", "gemma4", "mistral")  # layers of both kinds, heads of two sizes, and a window in all layers
WINDOWED = [
    pytest.param(name, marks=[] if name in _OFTEN else pytest.mark.long)
    for name, config in FAMILIES.items()
    if config.get("sliding_window")
]


@pytest.mark.parametrize("name", WINDOWED)
def test_no_query_sees_what_lies_behind_its_window(name: str, tmp_path: Path) -> None:
    """Freed blocks hold NaN, and are used again."""
    save_model(name, tmp_path)
    decoder = load(tmp_path)
    assert decoder.spec.cache_layout.window > 0
    kept, freed = run_driver(decoder, has_windows=False), run_driver(decoder, has_windows=True)
    assert [one.tokens for one in freed.sequences] == [one.tokens for one in kept.sequences]
    assert max(one.num_freed for one in freed.sequences) > 1
    found, expected = freed.batch.sampled_logprobs, kept.batch.sampled_logprobs
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def run_driver(decoder: object, *, has_windows: bool) -> Driver:
    driver = Driver(decoder, has_windows=has_windows)  # type: ignore[arg-type]
    for prompt in make_prompts()[1:6]:
        driver.add(prompt, NUM_NEW, {Param.NUM_LOGPROBS: 0})
    driver.run(max_chunk=24)
    return driver


@pytest.fixture(scope="module", params=["gemma3", pytest.param("mistral", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    return path


def test_hits_behind_freed_blocks_give_the_tokens_of_a_cold_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hits_behind_freed_blocks(model, "cpu", monkeypatch)


@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.long)])
def test_prompts_at_once_give_their_tokens_though_some_are_preempted(
    model: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many_at_once(model, "cpu", count, monkeypatch)
