# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family against transformers with the same weights, through a whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blink.config import ModelConfig
from blink.kernels.batch import Batch, Param
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.families import FAMILIES as KNOWN
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.plan.site import Bucket
from blink.runner.run import Runner
from model_driver import Driver
from model_families import FAMILIES, MXFP4, NUM_NEW, check, count_parameters, generate, make_prompts, save_model

# The others are near to these: what sets them apart is in the long run, and in tests of their parts.
_LONG = {"llama-biased", "qwen2-yarn", "qwen3", "qwen3_moe-plain", "ministral", "phi3-short", "gemma4-heads", MXFP4}
_LONG |= {"glm4_moe-plain", "opt-unbiased", "granite4-hybrid-dense"}
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in _LONG else name for name in FAMILIES]
# These have all options that a step's begin, middle and end know.
_CUT = {"gemma2", "gemma3", "gemma4", "olmo2", "granite"}
CUT_NAMES = [name if name in _CUT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    assert read_spec(tmp_path).num_parameters == count_parameters(model)
    prompts = make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cpu"))


@pytest.mark.parametrize("name", CUT_NAMES)
def test_steps_in_segments_compute_what_whole_steps_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer by itself, with nothing but its own arrays from one to the next."""
    save_model(name, tmp_path)
    decoder = load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"), torch.float32)
    residual = torch.full((4096, decoder.spec.hidden_size), torch.nan)

    def forward_in_segments(self: Runner, batch: Batch, kv_cache: KvCache, size: Bucket) -> None:
        for layer in range(decoder.spec.num_layers):
            self.forward_segment(batch, kv_cache, size, range(layer, layer + 1), residual)

    whole = run_driver(decoder)
    monkeypatch.setattr(Runner, "forward", forward_in_segments)
    cut = run_driver(decoder)
    assert [sequence.tokens for sequence in cut.sequences] == [sequence.tokens for sequence in whole.sequences]
    torch.testing.assert_close([layer.cells for layer in cut.kv_cache], [layer.cells for layer in whole.kv_cache])
    torch.testing.assert_close(cut.batch.sampled_logprobs, whole.batch.sampled_logprobs)


def run_driver(decoder: Decoder) -> Driver:
    driver = Driver(decoder)
    for prompt in make_prompts()[2:7]:
        driver.add(prompt, NUM_NEW, {Param.NUM_LOGPROBS: 0})
    driver.run(max_chunk=24)
    return driver


def test_the_text_part_of_a_model_that_sees_pictures_is_read(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    expected = generate(tmp_path, [[5, 9, 33]], "cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    weights = take_weights(tmp_path)
    save_file({f"language_model.{name}": value for name, value in weights.items()}, tmp_path / "model.safetensors")
    assert generate(tmp_path, [[5, 9, 33]], "cpu") == expected


def test_the_output_layer_of_a_text_part_is_read_whatever_the_outer_part_says(tmp_path: Path) -> None:
    """As Mistral Small 3.1 is published: its text has an output layer, and its outer part is tied by default."""
    save_model("mistral", tmp_path)
    expected = generate(tmp_path, [[5, 9, 33]], "cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    nested = {"model_type": "mistral3", "text_config": config, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    weights = take_weights(tmp_path)
    save_file({f"language_model.{name}": value for name, value in weights.items()}, tmp_path / "model.safetensors")
    assert generate(tmp_path, [[5, 9, 33]], "cpu") == expected


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_are_read_from_one_tensor_of_all_or_one_for_each(name: str, tmp_path: Path) -> None:
    """Published files have one of all, transposed or not; those that transformers writes may not."""
    save_model(name, tmp_path)
    prompts = make_prompts()[2:5]
    expected = generate(tmp_path, prompts, "cpu")
    weights = take_weights(tmp_path)
    rewrite = transpose_experts if any(part.endswith("experts.down_proj") for part in weights) else fuse_experts
    save_file(rewrite(weights), tmp_path / "model.safetensors")
    assert generate(tmp_path, prompts, "cpu") == expected


def take_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a directory's weights, and delete their files."""
    weights = {name: value for shard in path.glob("*.safetensors") for name, value in load_file(shard).items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return weights


def transpose_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.mT.contiguous() if ".experts." in name else value for name, value in weights.items()}


def fuse_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        experts = range(len({name for name in weights if name.startswith(f"{prefix}.experts.")}) // 3)
        gate, up, down = (
            torch.stack([weights[f"{prefix}.experts.{expert}.{part}_proj.weight"] for expert in experts])
            for part in ("gate", "up", "down")
        )
        found |= {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}
    return found


def test_every_family_has_a_model_here() -> None:
    assert {config["model_type"] for config in FAMILIES.values()} == set(KNOWN)
