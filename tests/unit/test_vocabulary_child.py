# SPDX-License-Identifier: Apache-2.0
"""The child that reads a model's tokens for the engine: it gives what the engine would read itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blink.config import ModelConfig
from blink.text.model_vocabulary import read_vocabulary, read_whole_vocabulary
from blink.text.vocabulary import Vocabulary, list_vocabulary
from make_tokenizer import FOLDER
from small_tokenizer import load_small_assets

# What the command does, with a child that is or is not killed before it has read anything.
_PROGRAM = """
import os, signal, sys
from blink.config import EngineConfig, ModelConfig
from blink.engine.vocabulary_child import VocabularyChild
import logging
logging.basicConfig(format="%(message)s")
config = EngineConfig(model=ModelConfig(model=sys.argv[1]))
child = VocabularyChild(config.model)
if sys.argv[2] == "kill":
    os.kill(child.process, signal.SIGKILL)
from blink.engine.vocabulary import read_vocabulary
found = read_vocabulary(config, int(sys.argv[3]), child)
print(found.starts.tolist(), found.text.tolist(), "tokenizers" in sys.modules, sep="\\n")
"""


def run_child(folder: Path, fate: str, vocab_size: int) -> tuple[Vocabulary, bool, str]:
    """Return what a child of another process gives, whether that process has loaded tokenizers, and what it says."""
    command = [sys.executable, "-c", _PROGRAM, str(folder), fate, str(vocab_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    starts, text, has_loaded = map(json.loads, done.stdout.lower().splitlines())
    return Vocabulary(np.array(starts, np.uint32), np.array(text, np.uint8)), has_loaded, done.stderr


def check_same(found: Vocabulary, wanted: Vocabulary) -> None:
    """Compare two vocabularies."""
    np.testing.assert_array_equal(found.starts, wanted.starts, strict=True)
    np.testing.assert_array_equal(found.text, wanted.text, strict=True)


@pytest.mark.parametrize("others", [-300, -1, 0, 1, 77])
def test_a_vocabulary_of_another_size_is_as_if_listed_so(others: int) -> None:
    tokenizer = load_small_assets().tokenizer
    size = tokenizer.end_id
    check_same(list_vocabulary(tokenizer, size).resize(size + others), list_vocabulary(tokenizer, size + others))


@pytest.mark.parametrize("fate", ["live", "kill"])
def test_the_child_gives_what_the_engine_would_read_without_it_or_with_it_dead(fate: str) -> None:
    config = ModelConfig(model=str(FOLDER))
    size = load_small_assets().tokenizer.end_id + 24
    found, has_loaded, said = run_child(FOLDER, fate, size)
    check_same(found, read_vocabulary(config, size))
    assert has_loaded == (fate == "kill"), "the engine needs a tokenizer's memory only where the child has failed"
    assert said == ""


def test_a_model_without_a_tokenizer_has_no_tokens_and_its_log_says_why(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "config.json", tmp_path)
    found, has_loaded, said = run_child(tmp_path, "live", 50)
    check_same(found, Vocabulary(np.zeros(51, np.uint32), np.zeros(0, np.uint8)))
    assert not has_loaded
    assert said.count("no structured outputs") == 1
    assert "tokenizer.json" in said


def test_ids_beyond_all_bounds_are_left_to_the_engine_which_knows_how_many_there_are() -> None:
    config = ModelConfig(model=str(FOLDER))
    end = load_small_assets().tokenizer.end_id
    assert read_whole_vocabulary(config, end - 1) is None
    found = read_whole_vocabulary(config, end)
    assert found is not None and len(found.starts) == end + 1
