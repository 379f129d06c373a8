# SPDX-License-Identifier: Apache-2.0
"""Model files from strangers: whatever is wrong with one ends in one line and takes little memory.

BLINK_MUTATIONS sets how many are tried of each kind of file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from blink.config import FrontendConfig, ModelConfig
from blink.errors import ConfigError
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.text.assets import load_assets
from model_families import FAMILIES, SMALL
from model_mutations import (
    DIRECTORY_KINDS,
    GGUF_KINDS,
    GgufMutator,
    assert_one_line,
    memory_limit,
    mutate_directory,
    mutate_json,
    write_directory,
    write_gguf,
)
from small_tokenizer import write_hollow_gguf

NUM_MUTATIONS = int(os.environ.get("BLINK_MUTATIONS", "40"))
NUM_LONG = 7000  # of each of three kinds, together more than 20,000
COUNTS = [NUM_MUTATIONS, pytest.param(NUM_LONG, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
MARGIN = 768 << 20  # what 2,097,152 positions of a head of 32 take twice over, and the allocators' arenas

pytestmark = pytest.mark.timeout(120 + NUM_MUTATIONS)


def load_weights(path: Path) -> None:
    load_model(ModelConfig(model=str(path)), torch.device("cpu"), torch.float32)


def describe(path: Path) -> None:
    spec = read_spec(path)
    assert spec.num_parameters > 0
    assert all(0 <= attention.window < spec.max_model_len for attention in spec.attentions)
    spec.limit(1 << 21)


def load_frontend(path: Path) -> None:
    load_assets(FrontendConfig(model=ModelConfig(model=str(path))))


def outcomes(path: Path, loads: tuple[Callable[[Path], object], ...]) -> list[str]:
    """Load a model in several ways; each may only succeed or raise a ConfigError."""
    found: list[str] = []
    for load in loads:
        try:
            with memory_limit(MARGIN):
                load(path)
            found.append("success")
        except ConfigError as error:
            assert_one_line(error)
            found.append("refusal")
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_damaged_gguf_files_are_refused_in_one_line(tmp_path: Path, kind: str, count: int) -> None:
    path, count = tmp_path / "model.gguf", count // len(GGUF_KINDS)
    write_gguf(path, kind)
    assert outcomes(path, (load_weights, load_frontend)) == ["success", "success"]
    mutator, seen = GgufMutator(path), Counter[str]()
    for seed in range(count):
        path.write_bytes(mutator.mutate(random.Random(seed)))
        seen.update(outcomes(path, (load_weights, load_frontend)))
    assert seen["refusal"] > count > seen["success"] > count // 10


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", DIRECTORY_KINDS)
def test_damaged_directories_are_refused_in_one_line(tmp_path: Path, kind: str, count: int) -> None:
    whole, path, count = tmp_path / "whole", tmp_path / "model", count // len(DIRECTORY_KINDS)
    write_directory(whole, kind)
    assert outcomes(whole, (load_weights, load_frontend)) == ["success", "success"]
    seen = Counter[str]()
    for seed in range(count):
        shutil.copytree(whole, path, dirs_exist_ok=True)
        mutate_directory(path, random.Random(seed))
        seen.update(outcomes(path, (load_weights, load_frontend)))
    assert seen["success"] > count // 2
    assert seen["refusal"] > count // 5


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_descriptions_of_every_family_are_refused_in_one_line(tmp_path: Path, count: int) -> None:
    configs = [AutoConfig.for_model(**{**SMALL, **options}).to_dict() for options in FAMILIES.values()]
    texts, seen = [json.dumps(config) for config in configs], Counter[str]()
    for seed in range(count):
        rng, values = random.Random(seed), json.loads(texts[seed % len(texts)])
        for _ in range(rng.choice([1, 1, 2])):
            mutate_json(values, rng)
        (tmp_path / "config.json").write_text(json.dumps(values))
        seen.update(outcomes(tmp_path, (describe,)))
    assert seen["success"] > count // 4
    assert seen["refusal"] > count // 8


def test_damaged_headers_of_a_whole_vocabulary_are_refused_in_one_line(tmp_path: Path) -> None:
    whole, path, seen = tmp_path / "whole.gguf", tmp_path / "model.gguf", Counter[str]()
    write_hollow_gguf(whole)
    size, mutator = whole.stat().st_size, GgufMutator(whole)
    for seed in range(NUM_MUTATIONS // 10):
        path.write_bytes(mutator.mutate(random.Random(seed)))
        os.truncate(path, size)  # the weights are a hole
        seen.update(outcomes(path, (read_spec, read_gguf_metadata)))
    assert seen["refusal"]
    assert seen["success"]
