# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family on the GPU, against transformers on the CPU with the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.kernels.batch import Batch
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.plan.site import Bucket
from blink.runner.run import Runner
from model_driver import Driver, load_decoder
from model_families import FAMILIES, check, generate, make_prompts, save_model

pytestmark = pytest.mark.gpu

_GEMMA4 = [name for name in FAMILIES if name.startswith("gemma4")]
_TOKENS = 40  # of a prompt: more than a window, and no more than the shortest of those taken


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    prompts = make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cuda"))


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_per_layer_embeddings_are_read_from_either_memory(place: str, tmp_path: Path) -> None:
    model = save_model("gemma4", tmp_path)
    prompts = make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cuda", per_layer_embeddings=place))


def test_a_random_table_in_the_hosts_memory_is_as_others(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path)
    config = ModelConfig(model=str(tmp_path), load_format="dummy", per_layer_embeddings="host")
    model = load_model(config, torch.device("cuda"), torch.bfloat16)
    assert model.inputs is not None
    table = model.inputs.table
    assert table.device.type == "cpu" and table.is_pinned()
    assert table.float().std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("name", _GEMMA4)
def test_each_layer_is_as_near_to_float32_as_bfloat16_is_on_the_cpu(
    name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By segments of a layer each: the first that is not names the layer at fault."""
    save_model(name, tmp_path)
    places = (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16))
    exact, rounded, found = (
        trace_layers(load_decoder(tmp_path, device, dtype, quantization), monkeypatch) for device, dtype in places
    )
    for (step, layer), expected in exact.items():
        error, most = (
            float((residual[step, layer] - expected).norm() / expected.norm()) for residual in (found, rounded)
        )
        assert error < 2 * most + 1e-3, f"{step} step, layer {layer}: {error:.4f}, on the CPU {most:.4f}"


def trace_layers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], Tensor]:
    """Return the residual behind each layer, of a step of prompts and of one of decoding rows."""
    residual = torch.zeros(4096, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    found: dict[tuple[str, int], Tensor] = {}

    def forward(self: Runner, batch: Batch, kv_cache: KvCache, size: Bucket) -> None:
        size = replace(size, decoding=size.tokens == size.rows)
        for layer in range(decoder.spec.num_layers):
            self.forward_segment(batch, kv_cache, size, range(layer, layer + 1), residual)
            found["decode" if size.decoding else "prompt", layer] = residual[: size.tokens].float().cpu().clone()

    monkeypatch.setattr(Runner, "forward", forward)
    driver = Driver(decoder)
    for prompt in make_prompts()[-3:]:
        driver.add(prompt[:_TOKENS], 1)
    driver.step(max_chunk=_TOKENS - 1)
    driver.step(max_chunk=1)
    return found
