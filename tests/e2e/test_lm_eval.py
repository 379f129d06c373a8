# SPDX-License-Identifier: Apache-2.0
"""lm_eval, the real package, against a live server: its results equal those of its own Hugging Face backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.models.weights.files import default_model_path
from processes import Frontend, run_engine, start_frontend, stop

with pytest.MonkeyPatch.context() as _patch:  # read when these are imported, and not for what other tests start
    _patch.setenv("HF_HUB_OFFLINE", "1")
    _patch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval: Any = pytest.importorskip("lm_eval", reason="needs the extra eval: pip install '.[eval]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not in Blink's cache"),
]

CHOICES = [
    ("The capital of France is", ["Paris", "Rome", "a banana"], 0),
    ("Water freezes at zero degrees", ["Celsius", "Monday", "Kelvin"], 0),
    ("The opposite of hot is", ["cold", "loud", "green"], 0),
    ("A week has seven", ["days", "years", "wheels"], 0),
    ("The sun rises in the", ["west", "east", "kitchen"], 1),
    ("Two plus two equals", ["five", "four", "purple"], 1),
    ("Dogs often chase", ["mountains", "cats", "theorems"], 1),
    ("She opened the door with a", ["cloud", "river", "key"], 2),
    ("Fish live in", ["fire", "paper", "water"], 2),
    ("The first month of the year is", ["June", "October", "January"], 2),
]
QUESTIONS = [
    ("The capital of Italy is", "Rome"),
    ("One, two, three,", "four"),
    ("The colour of grass is", "green"),
    ("Monday, Tuesday,", "Wednesday"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as a Hugging Face directory."""
    path, source = tmp_path_factory.mktemp("smollm2"), default_model_path()
    found: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del found.config.quantization_config
    plain: Any = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32)
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(path)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Frontend]:
    with run_engine(str(model), "--dtype=float32", "--max-model-len=1024") as engine:
        frontend = start_frontend(engine.region, str(model), "--served-model-name", "smollm2")
        yield frontend
        stop(frontend.process)


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    """Return one task of each kind, over files with the data above."""
    rows = {
        "choices": [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in CHOICES],
        "questions": [{"question": text, "answer": answer} for text, answer in QUESTIONS],
    }
    for name, items in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))

    def task(name: str, **options: Any) -> dict[str, Any]:
        files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        return {
            "task": f"blink_{name}",
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **options,
        }

    return [
        task(
            "choices",
            output_type="multiple_choice",
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        ),
        task(
            "questions",
            output_type="generate_until",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": ["."], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
            metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        ),
    ]


def evaluate(folder: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=write_tasks(folder), log_samples=True, bootstrap_iters=0
    )


def test_results_equal_those_of_lm_evals_own_backend(
    server: Frontend, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = evaluate(tmp_path, "hf", {"pretrained": str(model), "dtype": "float32", "device": "cpu"})
    address = f"{server.url}/v1/completions"
    options = {"model": "smollm2", "base_url": address, "tokenizer": str(model), "tokenizer_backend": "huggingface"}
    found = evaluate(tmp_path, "local-completions", {**options, "num_concurrent": 4, "batch_size": 4})
    assert found["results"]["blink_choices"]["acc,none"] == expected["results"]["blink_choices"]["acc,none"] > 0.5
    samples = [run["samples"]["blink_choices"] for run in (found, expected)]
    for own, other in zip(*samples, strict=True):
        pairs = zip(own["filtered_resps"], other["filtered_resps"], strict=True)
        for (logprob, greedy), (reference, greedily) in pairs:
            assert float(logprob) == pytest.approx(float(reference), rel=1e-3)
            assert str(greedy) == str(greedily)
    texts = [[sample["filtered_resps"] for sample in run["samples"]["blink_questions"]] for run in (found, expected)]
    assert texts[0] == texts[1]
