# SPDX-License-Identifier: Apache-2.0
"""Newer weights in a model's own memory: afterwards it is as one that was loaded with them, at the same addresses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.base import QuantizedWeight
from blink.models.decoder import Decoder
from blink.models.weights import packed_loader
from blink.models.weights.loader import ModelSource, open_model
from blink.models.weights.mtp_loader import load_mtp
from model_families import save_model
from mtp_layers import add_mtp, draw_mtp
from quantized_checkpoints import write_checkpoints
from turned_weights import drop_tensor, turn_weights

CPU = torch.device("cpu")
FAMILIES = ["llama-3.1", "qwen2", "qwen3_moe", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "opt-350m", "granite4-hybrid"]
FAMILIES += ["deepseek_v3", "glm4_moe"]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def open_source(folder: Path, **options: Any) -> ModelSource:
    return open_model(ModelConfig(model=str(folder), dtype="bfloat16", **options), CPU, torch.bfloat16)


def list_tensors(part: object) -> Iterator[Tensor]:
    """Yield every tensor that the collector finds below a model's weights, in an order that its classes give."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Decoder | QuantizedWeight | list | tuple | dict) or is_dataclass(part):
        for item in gc.get_referents(part):
            if not isinstance(item, type):
                yield from list_tensors(item)


def test_newer_weights_are_those_of_the_draft_layer_too(tmp_path: Path) -> None:
    """Where they lack it, nothing is changed."""
    gpu_weights = pytest.importorskip("blink.engine.gpu_weights", reason="needs the packages of the gpu extra")
    configs = [ModelConfig(model=str(tmp_path / name), dtype="bfloat16") for name in ("first", "second", "third")]
    for seed, config in enumerate(configs[:2]):
        save_model("qwen3_5", path := Path(config.model))
        add_mtp(path, draw_mtp(path, seed=seed))
    drop_tensor(Path(configs[0].model), Path(configs[2].model), "mtp.fc.weight")
    model = open_source(Path(configs[0].model)).load()
    model.add_head(load_mtp(configs[0], model), spare_blocks=32)
    before, places = [one.clone() for one in list_tensors(model.head)], [one.data_ptr() for one in list_tensors(model)]
    weights = gpu_weights.GpuWeights(model, None)
    with pytest.raises(ConfigError, match=r"mtp\.fc\.weight"):
        weights.open_weights(configs[2], ())
    source = weights.open_weights(configs[1], ())
    assert len(before) > 10 and all(map(torch.equal, list_tensors(model.head), before))
    weights.load_weights(source)
    assert all(map(torch.equal, list_tensors(model.head), list_tensors(load_mtp(configs[1], model))))
    assert not all(map(torch.equal, list_tensors(model.head), before))
    assert [one.data_ptr() for one in list_tensors(model)] == places


def check_replaced(first: ModelSource, second: ModelSource, fresh: ModelSource) -> None:
    """Expect that a model of the first is that of the second, once the second was written over it."""
    model = first.load()
    before = [one.clone() for one in list_tensors(model)]
    places = [one.data_ptr() for one in list_tensors(model)]
    second.check_over(model)
    assert all(map(torch.equal, before, list_tensors(model)))
    second.write_over(model)
    wanted = [*list_tensors(fresh.load())]
    assert len(wanted) == len(places) > 10
    assert all(map(torch.equal, list_tensors(model), wanted))
    assert not all(map(torch.equal, before, wanted))
    assert [one.data_ptr() for one in list_tensors(model)] == places


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_weights_are_those_of_a_load_in_the_same_memory(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path / "first")
    second = turn_weights(tmp_path / "first", tmp_path / "second")
    check_replaced(open_source(tmp_path / "first"), open_source(second), open_source(second))


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-block", "awq", "gptq", "packed", "packed-fp8-head"])
def test_so_are_matrices_that_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, experts: dict[str, Any]
) -> None:
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda target: True)  # noqa: ARG005 - packs as for a GPU
    first, _ = write_checkpoints(tmp_path, scheme, **experts)
    second = turn_weights(first, tmp_path / "second")
    check_replaced(open_source(first), open_source(second), open_source(second))


def test_so_are_matrices_that_are_rounded_to_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda target: True)  # noqa: ARG005
    _, first = write_checkpoints(tmp_path, "fp8-channel")
    second = turn_weights(first, tmp_path / "second")
    sources = (open_source(folder, quantization="fp8") for folder in (first, second, second))
    check_replaced(*sources)


def test_a_checkpoint_in_another_form_or_with_a_hole_is_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda target: True)  # noqa: ARG005
    first, plain = write_checkpoints(tmp_path, "awq")
    hollow = drop_tensor(first, tmp_path / "hollow", "layers.1.mlp.down_proj.qweight")
    model = open_source(first).load()
    before = [one.clone() for one in list_tensors(model)]
    for folder, reason in ((plain, "'layers.0.qkv' is PackedWeight"), (hollow, "layers.1.mlp.down_proj")):
        with pytest.raises(ConfigError, match=reason):
            open_source(folder).check_over(model)
    assert all(map(torch.equal, before, list_tensors(model)))


def test_scales_of_an_fp8_cache_that_differ_are_refused(tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path / "first")
    source = open_source(tmp_path / "first", kv_cache_dtype="fp8")
    model = source.load()
    source.check_over(model)
    scales = [replace(one, key=0.5) for one in source.kv_scales]
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.kv_scales\.key' is 1\.0 here, and would be 0\.5"):
        replace(source, kv_scales=scales).check_over(model)
