# SPDX-License-Identifier: Apache-2.0
"""`blink doctor MODEL --gpu NAME` with the descriptions of today's models, which have no weights: what fits where."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from blink.cli.finding import Finding
from blink.cli.head_fit import add_head
from blink.cli.main import main
from blink.cli.model_fit import examine_given_model
from blink.cli.plan import PlanConfig
from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.families import FAMILIES, find_architecture
from blink.models.weights.source import read_spec
from blink.plan.gpus import KNOWN_GPUS
from eagle_heads import draw_head, write_head
from model_families import count_parameters, make_model
from today_configs import PUBLISHED, SMALL_CONFIGS

KIB, MB = 1 << 10, 10**6


def write(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def examine(model: str, **options: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_given_model(model, PlanConfig(**options))}


def find_numbers(finding: Finding, pattern: str) -> list[float]:
    match = re.search(pattern, finding.text)
    assert match, finding.text
    return [float(number) for number in match.groups()]


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_a_small_model_of_each_family_fits_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """One that is in the registry has the weights that transformers counts; any other is named."""
    values: dict[str, Any] = {"tie_word_embeddings": False, **copy.deepcopy(SMALL_CONFIGS[name])}
    found = examine(write(AutoConfig.for_model(**values).to_dict(), tmp_path), gpu="h100", max_num_seqs=8)
    if find_architecture(values["model_type"]) not in FAMILIES:
        assert set(found) == {"model"}
        assert found["model"].level == "fail"
        assert f"model type '{values['model_type']}' is not supported" in found["model"].text
        return
    assert {finding.level for finding in found.values()} == {"ok"}
    with torch.device("meta"):
        assert read_spec(tmp_path).num_parameters == count_parameters(make_model(values))


# What a sequence keeps, as computed by hand from the models' shapes: KiB a token in 16 bits, and MB of states with the
# last four inputs of the convolutions.
KEPT = {
    "Qwen3-VL-2B": (112, 0.0),
    "Qwen3-VL-30B-A3B": (96, 0.0),
    "Qwen3-Next-80B-A3B": (24, 75.5 + 2.36),
    "Qwen3.5-4B": (32, 50.3 + 1.57),
    "Qwen3.5-9B": (32, 50.3 + 1.57),
    "Qwen3.6-27B": (64, 151.0 + 3.93),
    "Qwen3.6-35B-A3B": (20, 62.9 + 1.97),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_sequence_keeps_is_said_for_the_longest_context(name: str, tmp_path: Path) -> None:
    found = examine(write(PUBLISHED[name], tmp_path), gpu="h200")
    token, states = KEPT[name]
    length, kept, of_token = find_numbers(
        found["sequence"], r"of (\d+) tokens keeps ([\d.]+) GiB of keys and values, ([\d.]+) KiB a token"
    )
    assert length == read_spec(tmp_path).max_model_len
    assert of_token == token
    assert kept == pytest.approx(length * token / KIB**2, abs=0.005)
    if states:
        [said] = find_numbers(found["sequence"], r"and ([\d.]+) MiB of states")
        assert said * 2**20 == pytest.approx(states * MB, rel=2e-3)
    else:
        assert "states" not in found["sequence"].text and "states" not in found


# Of 16 bits or FP8: does it fit a GPU with 8 sequences, and do its weights take these GB? None: its GB are not known.
FITS = [
    ("Qwen3-VL-2B", "h100", "auto", True, None),
    ("Qwen3-VL-30B-A3B", "h100", "auto", True, 61.1),
    ("Qwen3-Next-80B-A3B", "h100", "auto", False, 159.3),
    ("Qwen3-Next-80B-A3B", "h100", "fp8", False, 80.0),
    ("Qwen3-Next-80B-A3B", "h200", "fp8", True, 80.0),
    ("Qwen3.5-9B", "l40s", "auto", True, 17.9),
    ("Qwen3.6-27B", "l40s", "auto", False, 53.8),
    ("Qwen3.6-27B", "l40s", "fp8", True, 28.0),
    ("Qwen3.6-27B", "h100", "auto", True, 53.8),
    ("Qwen3.6-35B-A3B", "h100", "auto", True, 69.3),
    ("Qwen3.6-35B-A3B", "l40s", "auto", False, 69.3),
    ("Qwen3.6-35B-A3B", "a100", "fp8", True, 35.5),
]


@pytest.mark.parametrize(("name", "gpu", "quantization", "fits", "size"), FITS)
def test_a_published_model_fits_a_named_gpu_or_not(
    name: str, gpu: str, quantization: str, fits: bool, size: float | None, tmp_path: Path
) -> None:
    found = examine(write(PUBLISHED[name], tmp_path), gpu=gpu, quantization=quantization, max_num_seqs=8)
    assert (found["weights"].level == "ok") is fits
    assert (found["model"].level, "nothing (no weights here)" in found["precision"].text) == ("ok", True)
    [said, room] = find_numbers(found["weights"], r"([\d.]+) GiB of ([\d.]+) GiB")
    assert room < KNOWN_GPUS[gpu].memory / 2**30
    if size is not None:
        assert said * 2**30 == pytest.approx(size * 1e9, rel=0.01)
    assert ("KV cache" in found) is fits
    if fits:
        assert KNOWN_GPUS[gpu].name in found["speed"].text


def test_states_of_too_many_sequences_are_a_warning_with_a_number_that_fits(tmp_path: Path) -> None:
    model = write(PUBLISHED["Qwen3.6-35B-A3B"], tmp_path)
    many = examine(model, gpu="h100", max_num_seqs=200)
    assert many["states"].level == "warn"
    [fitting] = re.findall(r"--max-num-seqs (\d+)", many["states"].advice)
    assert examine(model, gpu="h100", max_num_seqs=int(fitting))["states"].level == "ok"
    assert examine(model, gpu="h100")["states"].level == "ok"  # by default as many as have room


@pytest.mark.parametrize(("name", "status"), [("Qwen3.6-35B-A3B", 0), ("Qwen3-Next-80B-A3B", 1)])
def test_the_command_says_whether_a_machine_with_the_gpu_can_serve(
    name: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", write(PUBLISHED[name], tmp_path), "--gpu", "h100"]) == status
    [*lines, last] = capsys.readouterr().out.splitlines()
    assert {line[6:].partition(":")[0] for line in lines if line[:2] in ("ok", "wa", "fa")} >= {"model", "sequence"}
    assert not any("python" in line for line in lines)  # this machine is not looked at
    assert last.startswith("A machine with NVIDIA H100 80GB HBM3 can" + ("not" if status else " serve."))


@pytest.mark.parametrize(("arguments", "said"), [(["--gpu", "h100"], "needs MODEL"), ([".", "--gpu", "tpu"], "h200")])
def test_what_cannot_be_looked_at_is_refused_by_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) != 0
    assert said in capsys.readouterr().err


def test_a_method_that_the_files_do_not_name_is_refused(tmp_path: Path) -> None:
    found = examine(write(PUBLISHED["Qwen3.6-27B"], tmp_path), gpu="h100", quantization="awq")
    assert found["model"].level == "fail" and "--quantization awq" in found["model"].text
    with pytest.raises(ConfigError, match="--gpu x"):
        examine(str(tmp_path), gpu="x")


def test_a_draft_layer_takes_its_weights_and_a_layer_of_the_cache(tmp_path: Path) -> None:
    """Of Qwen3.5-4B: one layer with attention and two norms of inputs, and what projects both; 4 drafts in states."""
    model = write(PUBLISHED["Qwen3.5-4B"], tmp_path)
    plain, found = (examine(model, speculative_config=config) for config in ("", '{"method": "mtp"}'))
    spec = read_spec(tmp_path)
    [layer] = {one for one in spec.layers if one.mixer.attention is not None}
    hidden, attention = spec.hidden_size, layer.mixer.attention
    assert attention is not None
    weights = layer.num_parameters(hidden) + 2 * hidden**2 + 3 * hidden
    own = 2 * attention.kv_heads * attention.head_dim * 4 / KIB  # of a token, in the 32 bits of a CPU
    assert find_numbers(found["drafts"], r"(\S+) GiB of weights.* (\S+) KiB") == [round(weights * 4 / 2**30, 2), own]
    pattern = r"(\S+) KiB a token"
    [before], [after] = (find_numbers(each["sequence"], pattern) for each in (plain, found))
    assert after == before + own and "drafts" not in plain
    pattern = r"and (\S+) MiB of states"
    [before], [after] = (find_numbers(each["sequence"], pattern) for each in (plain, found))
    assert before < after < before * 1.2


def test_a_draft_head_of_a_folder_is_counted_by_its_files(tmp_path: Path) -> None:
    model = write(PUBLISHED["Qwen3.5-4B"], tmp_path)
    tensors = draw_head(128, range(0, 128, 2), seed=1)
    folder = write_head(tmp_path / "head", tensors, (1, 2, 3))
    config = json.dumps({"method": "eagle3", "model": str(folder)})
    count = sum(each.numel() for each in tensors.values() if each.is_floating_point())
    spec, weights = add_head(read_spec(tmp_path), EngineConfig(speculative_config=config).speculation)
    assert weights == count and spec.drafter is not None and spec.drafter.kv_heads == 2
    assert examine(model, speculative_config=config)["drafts"].level == "ok"


@pytest.mark.parametrize(
    ("config", "gpu", "told"),
    [
        ({"method": "eagle3", "model": "nowhere"}, "", r"no config\.json"),
    ],
)
def test_drafts_that_an_engine_refuses_fail(config: dict[str, str], gpu: str, told: str, tmp_path: Path) -> None:
    found = examine(write(PUBLISHED["Qwen3.5-4B"], tmp_path), gpu=gpu, speculative_config=json.dumps(config))
    assert found["drafts"].level == "fail" and re.search(told, found["drafts"].text)
