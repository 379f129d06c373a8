# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a GPU notes events of its prefix cache in the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_router import check_predictions
from model_families import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_router_predicts_each_hit_in_a_cache_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama-3.1", tmp_path / "model")
    check_predictions(tmp_path / "model", "cuda", monkeypatch, 150)
