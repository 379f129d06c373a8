# SPDX-License-Identifier: Apache-2.0
"""The replay of recorded texts, on a CPU: a random model writes them, and drafts are those of their real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blink.models.weights.files import default_model_path
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_recorded_texts_are_replayed_with_the_drafts_of_their_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=3)
    options = ["--device=cpu", f"--tokenizer={default_model_path()}", "--num-blocks=512", "--repeats=1"]
    options += ["--rows", "1", "2", "--fresh-rows", "1", "2", "--stopped=0", f"--output={tmp_path / 'found.json'}"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    command = [sys.executable, str(ROOT / "benchmarks" / "speculation_replay.py"), str(model), *options]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=500)
    texts, head = json.loads((tmp_path / "found.json").read_text())["tables"]
    described = [dict(zip(texts["columns"], row, strict=True)) for row in texts["rows"]]
    rows = {(row["text"], row["rows"]): row for row in described}
    assert {kind for kind, _ in rows} == {"edit", "json", "never repeats"}
    assert rows["edit", 1]["tokens/step"] > 1.5 and rows["json", 1]["tokens/step"] > 1.5  # costs decide on drafts
    assert rows["never repeats", 1]["drafted"] == rows["never repeats", 2]["drafted"] == 0
    assert rows["never repeats", 1]["tokens/step"] == 1
    for row in head["rows"]:
        found = dict(zip(head["columns"], row, strict=True))
        assert found["drafted"] > 30 and 0.3 < found["accepted"] / found["drafted"] < 0.8
