# SPDX-License-Identifier: Apache-2.0
"""Where the table of per-layer embeddings lies: what --per-layer-embeddings says, or where there is room."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.schemes import FP8_ROWS
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.models.weights.token_table import choose_table_device, count_bytes
from model_families import generate, make_prompts, save_model

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "free", "found"),
    [
        ("auto", 80, GPU),
        ("auto", 20, GPU),
        ("auto", 16, CPU),
        ("gpu", 1, GPU),
        ("host", 80, CPU),
    ],
)
def test_the_table_lies_where_it_is_asked_for_or_fits(
    asked: str, free: int, found: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 E2B takes 9.3 GB in bfloat16, 4.7 of them for the table."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 80 * GIB))
    spec = read_spec(CONFIGS / "gemma-4-e2b")
    assert count_bytes(spec, torch.bfloat16) == 2 * spec.num_parameters == pytest.approx(9.3e9, rel=0.01)
    assert 2 * spec.num_table_weights == pytest.approx(4.7e9, rel=0.01)
    assert choose_table_device(asked, spec, GPU, torch.bfloat16) == found


def test_quantized_weights_leave_room_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (16 * GIB, 16 * GIB))
    spec = dataclasses.replace(read_spec(CONFIGS / "gemma-4-e2b"), quantization=FP8_ROWS)
    assert count_bytes(spec, torch.bfloat16) == 2 * spec.num_parameters - spec.num_matrix_weights
    assert choose_table_device("auto", spec, GPU, torch.bfloat16) == GPU


def test_a_model_without_a_table_asks_for_no_room() -> None:
    spec = read_spec(CONFIGS / "gemma-4-31b")
    assert spec.num_table_weights == 0
    assert choose_table_device("auto", spec, GPU, torch.bfloat16) == GPU


def test_a_cpu_engine_has_the_table_in_its_memory_and_knows_no_other(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path)
    prompts = make_prompts()[2:5]
    options: dict[str, Any] = {"per_layer_embeddings": "host"}
    assert generate(tmp_path, prompts, "cpu", **options) == generate(tmp_path, prompts, "cpu")
    with pytest.raises(ConfigError, match=r"--per-layer-embeddings gpu: this engine runs on the CPU"):
        load_model(ModelConfig(model=str(tmp_path), per_layer_embeddings="gpu"), CPU, torch.float32)
