# SPDX-License-Identifier: Apache-2.0
"""Small models of latent attention on the GPU with expanded prompts, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_families import check, generate, make_prompts, save_model

expanded = pytest.importorskip("blink.kernels.gpu.latent.expanded")
rows = pytest.importorskip("blink.kernels.gpu.latent.rows")

pytestmark = pytest.mark.gpu


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """Return a list that grows whenever a function is called."""
    calls, function = list[str](), getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return calls


@pytest.mark.parametrize("kept", [200, 0])
@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v3", "deepseek_v2"])
def test_expanded_prompts_give_the_tokens_of_transformers(
    name: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run in chunks of at most 56 tokens; kept: earlier tokens that there is room for."""
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 24)
    monkeypatch.setattr(expanded, "count_least_queries", lambda _: 20)
    monkeypatch.setattr(expanded, "count_room", lambda *_: kept)
    monkeypatch.setattr(rows, "LEAST_ALONE", 17)
    calls = count_calls(monkeypatch, expanded, "attend_expanded")
    model, prompts = save_model(name, tmp_path), make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cuda"))
    assert calls
