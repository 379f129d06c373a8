# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a model needs, by its description: what doctor says and --tensor-parallel-size auto takes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blink.cli.flags import add_flags, build_config, to_flags
from blink.cli.model_fit import examine_given_model
from blink.cli.plan import PlanConfig
from blink.config import EngineConfig, ModelConfig
from blink.engine import boot
from blink.engine.rank_fit import choose_size, measure_model, settle_ranks
from blink.errors import ConfigError
from blink.formats.schemes import FP8_ROWS
from blink.models.weight_bytes import count_weights
from blink.models.weights.source import read_spec
from blink.plan.gpus import find_gpu
from tiny_model import write_tiny_model

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
LARGE = CONFIGS / "llama-3-70b"
H100 = int(find_gpu("h100").memory * 0.92)


def measure(path: Path, room: int = H100, num_gpus: int = 8, **options: Any) -> dict[int, Any]:
    config = EngineConfig(model=ModelConfig(model=str(path), load_format="dummy", **options))
    return {one.size: one for one in measure_model(config, room, num_gpus)}


def test_ranks_share_the_weights_and_what_is_left_holds_the_cache() -> None:
    found = measure(LARGE)
    whole = read_spec(LARGE)
    assert [*found] == [1, 2, 4, 8]
    assert found[1].weight_bytes == 2 * whole.num_parameters
    norms = 2 * (2 * 80 + 1) * 8192  # which every rank has
    assert all(one.size * (one.weight_bytes - norms) == found[1].weight_bytes - norms for one in found.values())
    block = 2 * 80 * 16 * 8 * 128 * 2  # bytes of 16 tokens on one GPU
    for one in (found[2], found[4]):
        assert one.num_blocks == (H100 - (1 << 30) - one.weight_bytes) // (block // one.size)
    assert [one.fits for one in found.values()] == [False, True, True, True]


@pytest.mark.parametrize(
    ("name", "room", "options", "size"),
    [
        ("llama-3-70b", H100, {}, 2),
        ("llama-3-70b", H100, {"quantization": "fp8"}, 1),
        ("llama-3-70b", H100 // 2, {"quantization": "fp8"}, 2),
        ("llama-3-70b", H100 // 2, {}, 4),
        ("qwen3-235b-a22b", H100, {}, 8),
        ("qwen3-235b-a22b", H100, {"quantization": "fp8"}, 4),
    ],
)
def test_the_smallest_size_that_fits_is_taken(name: str, room: int, options: dict[str, str], size: int) -> None:
    assert choose_size(measure(CONFIGS / name, room, 8, **options).values()) == size


def test_states_that_drafts_may_be_taken_back_of_leave_fewer_blocks() -> None:
    model = ModelConfig(model=str(CONFIGS / "qwen3.6-27b"), load_format="dummy")
    config = EngineConfig(model=model, max_num_seqs=1)
    drafting = replace(config, speculative_config='{"num_speculative_tokens": 15}')
    plain, found = (next(measure_model(one, H100, 1)) for one in (config, drafting))
    assert 0 < found.num_blocks < plain.num_blocks and found.weight_bytes == plain.weight_bytes


def test_a_model_that_fits_on_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not fit 2 of these GPUs.* 65\.7 GiB of weights"):
        choose_size(measure(LARGE, H100 // 2, num_gpus=2).values())


def test_the_flag_takes_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    config = build_config(EngineConfig, parser.parse_args(["--tensor-parallel-size", "auto"]))
    assert build_config(EngineConfig, parser.parse_args(to_flags(config))) == config
    with pytest.raises(SystemExit):
        parser.parse_args(["--tensor-parallel-size", "any"])
    config = replace(config, model=ModelConfig(model=str(write_tiny_model(tmp_path)), load_format="dummy"))
    assert settle_ranks(replace(config, device="cpu"), boot.measure_gpus).tensor_parallel_size == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 << 30))
    assert settle_ranks(config, boot.measure_gpus).tensor_parallel_size == 1
    large = replace(config, model=ModelConfig(model=str(LARGE), load_format="dummy"))
    with pytest.raises(ConfigError, match="does not fit 2"):
        settle_ranks(large, boot.measure_gpus)


def test_doctor_says_what_each_gpu_would_hold() -> None:
    findings = {one.subject: one.text for one in examine_given_model(str(LARGE), PlanConfig(gpu="h100"))}
    assert "2: 65.7 GiB and 2483 KV blocks; 4: 32.9 GiB and" in findings["GPUs"]
    assert "1: 131.4 GiB and too little room" in findings["GPUs"]


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def blocks_of_experts(tmp_path: Path) -> Path:
    """Qwen3-235B as its FP8 checkpoint is: 1,536 columns of an expert are no eight whole blocks, but four."""
    config = json.loads((CONFIGS / "qwen3-235b-a22b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    return tmp_path


@pytest.mark.parametrize(
    ("size", "has", "experts"), [(4, "parts of 128 experts", 128 / 4), (8, "16 whole experts of 128", 16)]
)
def test_doctor_judges_the_part_of_a_rank(size: int, has: str, experts: float, blocks_of_experts: Path) -> None:
    options = PlanConfig(gpu="h100", tensor_parallel_size=size)
    findings = {one.subject: one for one in examine_given_model(str(blocks_of_experts), options)}
    assert f"one of {size} ranks, with {has};" in findings["rank"].text
    layers, hidden, width = 94, 4096, 1536
    of_experts = layers * experts * 3 * hidden * width * (1 + 4 / 128)  # each row with its blocks' scales
    attention = layers * hidden * 128 * (64 * 2 / size + 2)
    others = 2 * (layers * 128 * hidden + 2 * 151936 * hidden / size)  # routers and the vocabulary
    assert all(one.level == "ok" for one in findings.values())
    shown = float(findings["weights"].text.split(" GiB")[0]) * 2**30
    assert shown == pytest.approx(of_experts + attention * (1 + 8 / 128) + others, rel=2e-3)
    read = float(findings["speed"].text.split(": ")[1].split(" GiB")[0]) * 2**30
    of_token = of_experts * 8 / 128 + attention * (1 + 4 / 128) + others - 2 * 151936 * hidden / size
    of_token -= 2 * layers * 120 * hidden  # of the router the rows of chosen experts are counted
    assert read == pytest.approx(of_token, rel=2e-3)


def test_a_size_that_does_not_divide_fails_with_those_that_do(blocks_of_experts: Path) -> None:
    [finding] = examine_given_model(str(blocks_of_experts), PlanConfig(gpu="h100", tensor_parallel_size=3))
    assert finding.level == "fail" and "sizes that fit: 1, 2, 4, 8" in finding.text


def test_parts_of_an_output_layer_are_counted_once() -> None:
    spec = replace(read_spec(LARGE), quantization=replace(FP8_ROWS, output=FP8_ROWS))
    whole = count_weights(spec, 2, stays_quantized=True).total
    part = count_weights(spec.split(2)[1], 2, stays_quantized=True).total
    assert 0.5 < part / whole < 0.501
