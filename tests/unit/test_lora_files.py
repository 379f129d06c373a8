# SPDX-License-Identifier: Apache-2.0
"""An adapter's files: each tensor is checked against the model, and what is not obeyed is refused by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.adapters.module import Module
from blink.adapters.peft_config import read_config
from blink.adapters.peft_files import Adapter, read_adapter
from blink.errors import BadRequestError
from lora_adapters import PREFIX, write_adapter

QKV, DOWN = torch.zeros(24, 8), torch.zeros(8, 16)
MODULES = {
    "layers.0.self_attn.q_proj": Module(QKV, slice(0, 8), (8, 8), None),
    "layers.0.self_attn.k_proj": Module(QKV, slice(8, 16), (8, 8), torch.arange(7, -1, -1)),
    "layers.0.mlp.down_proj": Module(DOWN, slice(0, 8), (8, 16), None),
    "layers.0.self_attn.kv_b_proj": Module(DOWN, slice(0, 8), (8, 16), None, refusal="it is absorbed"),
}
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.self_attn.k_proj": (8, 8)}
SHAPES["model.layers.0.mlp.down_proj"] = (8, 16)
TARGETS = {name: torch.empty(shape) for name, shape in SHAPES.items()}
Q_DOWN, Q_UP = (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")


def read(folder: Path, max_rank: int = 16, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(folder, [MODULES], max_rank, torch.empty(0, dtype=dtype))


def refusal(folder: Path, max_rank: int = 16) -> str:
    """Return why an adapter is refused."""
    with pytest.raises(BadRequestError) as caught:
        read(folder, max_rank)
    assert caught.value.param == "lora_path"
    return caught.value.message


def test_the_updates_are_those_of_the_files_scaled_and_in_the_weights_order(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path, TARGETS, seed=1, rank=4, alpha=8))
    plain = read(write_adapter(tmp_path / "plain", TARGETS, seed=1, rank=4, alpha=4))
    assert set(adapter.updates) == {id(QKV), id(DOWN)}
    key, query = adapter.updates[id(QKV)]
    assert (query.rows, key.rows) == (slice(0, 8), slice(8, 16))
    for one, other in zip(adapter.updates[id(QKV)], plain.updates[id(QKV)], strict=True):
        assert torch.equal(one.down, other.down)
        assert torch.equal(one.up, other.up * 2)
    unordered = MODULES | {"layers.0.self_attn.k_proj": Module(QKV, slice(8, 16), (8, 8), None)}
    same = read_adapter(tmp_path, [unordered], 16, torch.empty(0)).updates[id(QKV)][0]
    assert torch.equal(same.up.flip(0), key.up)
    assert adapter.num_bytes == 4 * 4 * (16 + 16 + 24)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path, TARGETS, seed=1, rank=4, alpha=6, use_rslora=True)
    assert read_config(tmp_path, 16).scale == 3
    write_adapter(tmp_path, TARGETS, seed=1, rank=4, alpha=6)
    assert read_config(tmp_path, 16).scale == 1.5


def test_the_content_is_the_same_for_the_same_results_only(tmp_path: Path) -> None:
    same = [read(write_adapter(tmp_path / f"{copy}", TARGETS, seed=1)).content for copy in range(2)]
    others = [
        read(write_adapter(tmp_path / "seed", TARGETS, seed=2)).content,
        read(write_adapter(tmp_path / "alpha", TARGETS, seed=1, alpha=9)).content,
        read(write_adapter(tmp_path / "fewer", dict(list(TARGETS.items())[:2]), seed=1)).content,
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 4


CONFIGS: dict[str, dict[str, Any]] = {
    "use_dora is not supported": {"use_dora": True},
    "modules_to_save is not supported": {"modules_to_save": ["lm_head"]},
    "rank_pattern is not supported": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern is not supported": {"alpha_pattern": {"q_proj": 2}},
    "lora_bias is not supported": {"lora_bias": True},
    "fan_in_fan_out is not supported": {"fan_in_fan_out": True},
    "trainable_token_indices is not supported": {"trainable_token_indices": [3]},
    "bias must be none, got 'all'": {"bias": "all"},
    "peft_type must be LORA, got 'IA3'": {"peft_type": "IA3"},
    "init_lora_weights 'pissa' is not supported": {"init_lora_weights": "pissa"},
    "r is 32, and --max-lora-rank 16": {"r": 32},
    "r must be a whole number from 1 on, got True": {"r": True},
    "r must be a whole number from 1 on, got 0": {"r": 0},
    "lora_alpha must be a number above 0, got nan": {"lora_alpha": float("nan")},
    "lora_alpha must be a number above 0, got '8'": {"lora_alpha": "8"},
    "target_modules must be a list of names": {"target_modules": {"q_proj": 1}},
    "target_modules has 'up_proj', of which there is no tensor": {
        "target_modules": ["q_proj", "k_proj", "down_proj", "up_proj"]
    },
    "is of no module among target_modules": {"target_modules": ["q_proj", "k_proj"]},
    "target_parameters must be a list of names, got 'down_proj'": {"target_parameters": "down_proj"},
    "target_parameters has 'mlp.experts.down_proj', of which there is no tensor": {
        "target_parameters": ["mlp.experts.down_proj"]
    },
}


@pytest.mark.parametrize("reason", CONFIGS)
def test_a_configuration_that_is_not_obeyed_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    assert reason in refusal(write_adapter(tmp_path, TARGETS, seed=1, **CONFIGS[reason]))


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


EXPERT = f"{PREFIX}model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
ABSORBED = f"{PREFIX}model.layers.0.self_attn.kv_b_proj.lora_A.weight"
TENSORS: dict[str, dict[str, Tensor]] = {
    f"{Q_DOWN} has the shape [4, 9], and must have [4, 8]": {Q_DOWN: _zeros(4, 9)},
    f"{Q_UP} has the shape [8, 5], and must have [8, 4]": {Q_UP: _zeros(8, 5)},
    f"{Q_UP} has the shape [32], and must have [8, 4]": {Q_UP: _zeros(32)},
    f"{Q_DOWN} is of the type I64": {Q_DOWN: _zeros(4, 8, dtype=torch.int64)},
    f"{Q_DOWN} holds numbers that are not finite": {Q_DOWN: torch.full((4, 8), float("inf"))},
    f"{Q_UP} holds numbers that are not finite": {Q_UP: torch.full((8, 4), float("nan"))},
    f"{EXPERT!r} belongs to no module": {EXPERT: _zeros(4, 8)},
    f"{ABSORBED!r} belongs to a module that takes no adapter: it is absorbed": {ABSORBED: _zeros(4, 16)},
    "mlp.experts.lora_A.weight' belongs to no module": {
        f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight": _zeros(12, 8)
    },
    "layers.7.self_attn.q_proj.lora_A.weight' belongs to no module": {
        Q_DOWN.replace("layers.0", "layers.7"): _zeros(4, 8)
    },
    "lora_magnitude_vector' is no tensor": {Q_DOWN.replace("lora_A.weight", "lora_magnitude_vector"): _zeros(8)},
    "lm_head.weight' is no tensor": {f"{PREFIX}lm_head.weight": _zeros(2, 2)},
    "'../../etc.lora_A.weight' is no tensor": {"../../etc.lora_A.weight": _zeros(2, 2)},
    "is there twice": {Q_DOWN.replace(".weight", ".default.weight"): _zeros(4, 8)},
}


@pytest.mark.parametrize("reason", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    assert reason in refusal(write_adapter(tmp_path, TARGETS, seed=1, tensors=TENSORS[reason]))


def test_a_tensor_without_its_other_half_is_refused_by_name(tmp_path: Path) -> None:
    lonely = {f"{PREFIX}model.layers.0.mlp.down_proj.lora_B.weight": _zeros(8, 4)}
    others = {name: TARGETS[name] for name in TARGETS if "down" not in name}
    assert "down_proj.lora_B.weight' is there without its other half" in refusal(
        write_adapter(tmp_path, others, seed=1, tensors=lonely)
    )


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _spoil_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def _overlap(path: Path) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header[Q_DOWN]["data_offsets"] = [0, 1 << 50]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "is damaged": ("adapter_model.safetensors", _cut),
    "is damaged (": ("adapter_model.safetensors", _spoil_header),
    "is damaged (E": ("adapter_model.safetensors", _overlap),
    "there is no ": ("adapter_model.safetensors", _make_fifo),
    "there is no": ("adapter_config.json", _make_fifo),
    "adapter_config.json is no JSON object": ("adapter_config.json", lambda path: path.write_text("[1]")),
    "is no JSON": ("adapter_config.json", lambda path: path.write_text("[" * 100_000)),
    "is larger than": ("adapter_config.json", lambda path: path.write_text(" " * (2 << 20))),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, reason: str) -> None:
    name, damage = DAMAGE[reason]
    damage(write_adapter(tmp_path, TARGETS, seed=1) / name)
    assert reason.split(" (")[0] in refusal(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (write_adapter(tmp_path, TARGETS, seed=1) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "adapter_model.bin is not read: save it as safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_get_the_type_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = read(write_adapter(tmp_path, TARGETS, seed=1), dtype=dtype)
    assert {part.up.dtype for each in adapter.updates.values() for part in each} == {dtype}
