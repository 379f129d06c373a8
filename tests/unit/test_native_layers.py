# SPDX-License-Identifier: Apache-2.0
"""Layers that run in one call: they are taken, and give the bits of operations that are called one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_programs import load_benchmark
from blink.config import ModelConfig
from blink.kernels.rounding import Rounding
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.runner.cpu_code import CpuCode
from blink.runner.native_layers import NativeLayers
from blink.runner.step import Step
from blink.runner.stream import RunLayers
from model_driver import Driver

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 2**-17,
    "rope_theta": 10000.0,
}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "biases of QKV": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "norms of heads": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
PROMPTS = ([5, 17, 80], [3] * 40, [*range(90)], [7])


@torch.inference_mode()
def load(folder: Path, changes: dict[str, Any]) -> Decoder:
    (folder / "config.json").write_text(json.dumps(_COMMON | changes))
    load_benchmark("gguf_header").write_header(read_spec(folder), folder / "model.gguf", None)
    config = ModelConfig(model=str(folder / "model.gguf"), load_format="dummy")
    decoder = load_model(config, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(9)
    for layer in decoder.layers:
        norm = layer.head_norm
        drawn = (layer.qkv_bias, *(() if norm is None else (norm.query_weight, norm.key_weight)))
        for one in drawn:
            if one is not None:
                one.normal_(1, 0.3, generator=generator)
    return decoder


def generate(decoder: Decoder, rounding: Rounding, *, has_windows: bool = False) -> tuple[list[list[int]], Driver]:
    driver = Driver(decoder, max_len=160, has_windows=has_windows)
    driver.runner.rounding = rounding
    for index, prompt in enumerate(PROMPTS):  # which end one after the other: steps then have 1 to 4 rows
        driver.add(prompt, 12 + 6 * index)
    return driver.run(max_chunk=80), driver


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the layers of each call."""
    found, find = list[int](), NativeLayers.find_run

    def watch(self: NativeLayers, step: Step, layers: range) -> RunLayers | None:
        run = find(self, step, layers)
        if run is not None:
            found.append(len(layers))
        return run

    monkeypatch.setattr(NativeLayers, "find_run", watch)
    return found


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(activations=True)], ids=["float32", "int16"])
@pytest.mark.parametrize("cells", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_as_by_single_operations(
    name: str, cells: torch.dtype, rounding: Rounding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, runs = load(tmp_path, CONFIGS[name]), count_runs(monkeypatch)
    decoder.kv_dtype = cells
    tokens, driver = generate(decoder, rounding)
    assert len(runs) > 20 and set(runs) == {3}
    monkeypatch.setattr(CpuCode, "find_layers", lambda *_: None)
    expected, other = generate(decoder, rounding)
    assert len(runs) > 20 and tokens == expected
    for ours, theirs in zip(driver.kv_cache, other.kv_cache, strict=True):
        assert torch.equal(ours.cells, theirs.cells)


def test_windows_sinks_and_caps_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, runs = load(tmp_path, CONFIGS["llama"]), count_runs(monkeypatch)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    changes = ({"window": 24}, {"sinks": sinks}, {"softcap": 5.0, "scale": 0.3})
    decoder.layers = [
        replace(layer, attention=replace(layer.attention, **change))
        for layer, change in zip(decoder.layers, changes, strict=True)
    ]
    windowed = decoder.spec.layers[0]
    assert windowed.mixer.attention is not None
    first = replace(windowed, mixer=replace(windowed.mixer.attention, window=24))
    decoder.spec = replace(decoder.spec, layers=(first, *decoder.spec.layers[1:]))
    decoder.attentions = decoder.spec.attentions
    tokens, driver = generate(decoder, Rounding(), has_windows=True)
    assert len(runs) > 20
    monkeypatch.setattr(CpuCode, "find_layers", lambda *_: None)
    expected, other = generate(decoder, Rounding(), has_windows=True)
    assert tokens == expected
    for ours, theirs in zip(driver.kv_cache, other.kv_cache, strict=True):
        assert torch.equal(ours.cells.nan_to_num(), theirs.cells.nan_to_num())


def test_another_cache_of_the_same_model_is_taken(tmp_path: Path) -> None:
    decoder = load(tmp_path, CONFIGS["llama"])
    assert generate(decoder, Rounding())[0] == generate(decoder, Rounding())[0]


def test_layers_with_something_more_are_left_to_single_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, runs = load(tmp_path, CONFIGS["llama"]), count_runs(monkeypatch)
    for change in (
        {"attention_end_norm": torch.ones(256)},
        {"mlp_end_norm": torch.ones(256)},
        {"output_bias": torch.ones(256)},
        {"attention_norm": None},
    ):
        other = Decoder(
            decoder.spec,
            decoder.embedding,
            [replace(decoder.layers[0], **change), *decoder.layers[1:]],
            decoder.norm,
            decoder.lm_head,
            decoder.kv_dtype,
        )
        generate(other, Rounding())
    assert not runs
