# SPDX-License-Identifier: Apache-2.0
"""A model in memory that is taken away and given back: its weights are the same, and again after they were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.engine.sleeping_memory import SleepingMemory
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.models.weights.loader import ModelSource, open_model
from blink.models.weights.overwriting import list_tensors
from fake_memory import FakeMemory
from model_families import save_model

CPU = torch.device("cpu")
FAMILIES = ["llama-3.1", "qwen3_moe", "qwen3_5", "gemma4", "gpt_oss", "opt-350m", "deepseek_v3"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingMemory]:
    monkeypatch.setattr(FakeMemory, "mapped_bytes", 0)
    monkeypatch.setattr(FakeMemory, "limit", 1 << 40)
    yield SleepingMemory(FakeMemory, CPU)


def open_source(folder: Path) -> ModelSource:
    return open_model(ModelConfig(model=str(folder), dtype="bfloat16"), CPU, torch.bfloat16)


def list_weights(model: Decoder) -> Iterator[Tensor]:
    parts = model.embedding, model.positions, model.inputs, model.layers, model.norm, model.lm_head
    return list_tensors(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_was_moved_sleeps_and_is_written_anew(name: str, tmp_path: Path, memory: SleepingMemory) -> None:
    save_model(name, tmp_path)
    source = open_source(tmp_path)
    wanted = source.load()
    model = open_source(tmp_path).load(memory.place)
    own, expected = ([*list_weights(one)] for one in (model, wanted))
    assert all(map(torch.equal, own, expected)) and [x.stride() for x in own] == [x.stride() for x in expected]
    assert FakeMemory.mapped_bytes >= sum(one.nbytes for one in {x.data_ptr(): x for x in own}.values())
    places = [one.data_ptr() for one in own]
    memory.unmap()
    assert FakeMemory.mapped_bytes == 0
    assert not any(torch.equal(*pair) for pair in zip(own, expected, strict=True))
    memory.map()
    assert all(one.count_nonzero() == 0 for one in own)
    open_source(tmp_path).write_over(model)
    assert all(map(torch.equal, own, expected)) and [one.data_ptr() for one in own] == places


def test_cells_are_zeros_before_and_after_sleep(memory: SleepingMemory) -> None:
    cells = [memory.allocate((2, 3, 5), torch.float16, CPU), memory.allocate((0, 4), torch.float32, CPU)]
    for _ in range(3):
        assert cells[0].shape == (2, 3, 5) and all(one.count_nonzero() == 0 for one in cells)
        cells[0].fill_(7)
        memory.unmap()
        memory.unmap()
        memory.map()
        memory.map()


def test_what_was_saved_comes_back_once(memory: SleepingMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [memory.allocate((number, 5), torch.float16, CPU) for number in (1000, 2, 3)]
    for number, one in enumerate(cells):
        one.fill_(number)
    memory.save()
    memory.save()
    assert FakeMemory.mapped_bytes == 0
    with monkeypatch.context() as patch:
        patch.setattr(FakeMemory, "limit", 2 * 4096)
        with pytest.raises(ConfigError, match="too little GPU memory"):
            memory.map()
    memory.map()
    assert all(bool((one == number).all()) for number, one in enumerate(cells))
    memory.save()
    memory.unmap()
    memory.map()
    assert all(one.count_nonzero() == 0 for one in cells), "what was freed has come back"


def test_a_host_without_room_frees_nothing(memory: SleepingMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = memory.allocate((5,), torch.float16, CPU).fill_(3)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(ConfigError, match="host has too little memory"):
            memory.save()
    assert memory.is_mapped and bool((cells == 3).all())


def test_too_little_memory_to_wake_up_leaves_all_of_it_free(
    memory: SleepingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        memory.allocate((4096,), torch.uint8, CPU)
    memory.unmap()
    monkeypatch.setattr(FakeMemory, "limit", 2 * 4096)
    with pytest.raises(ConfigError, match="too little GPU memory"):
        memory.map()
    assert FakeMemory.mapped_bytes == 0 and not memory.is_mapped
    monkeypatch.setattr(FakeMemory, "limit", 1 << 40)
    memory.map()
    assert FakeMemory.mapped_bytes == 3 * 4096
