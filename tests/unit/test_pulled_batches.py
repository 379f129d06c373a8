# SPDX-License-Identifier: Apache-2.0
"""What a rank on another GPU copies of the scheduler's batch: all that its part of a step reads, adapters too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.config import EngineConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.kernels.batch import Batch, Param
from blink.lora_config import LoraConfig
from blink.plan.site import Bucket
from blink.region.layout import StepKind
from blink.region.memory import Region
from tiny_model import write_tiny_model

device_follower = pytest.importorskip("blink.engine.device_follower")

ROWS, BLOCK = 3, 16
LENGTHS, CONTEXTS, SLOTS, ADAPTERS = (1, 4, 2), (17, 40, 2), (2, 0, 3), (1, 0, 2)


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    path = write_tiny_model(tmp_path_factory.mktemp("pulled"), vocab_size=96, max_position_embeddings=128)
    model, lora = ModelConfig(model=str(path), load_format="dummy"), LoraConfig(enable_lora=True, max_loras=2)
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4}
    engine = CpuEngine(EngineConfig(model=model, device="cpu", region=f"pulled-{os.getpid()}", lora=lora, **sizes))
    yield engine._region
    engine.remove_region()


def pull_like_the_kernel(
    source: Tensor, to: Tensor, spans: Tensor, batch: Batch, own: Batch, rows: int, block: int, param: int | None = None
) -> None:
    """Do what csrc/kernels/comm/pull_batch.cu does."""
    for begin, count in spans.tolist():
        to.view(torch.int32)[begin : begin + count] = source.view(torch.int32)[begin : begin + count]
    for row in range(rows):
        slot, blocks = int(batch.row_slots[row]), -(-int(batch.context_lens[row]) // block)
        own.block_tables[slot, :blocks] = batch.block_tables[slot, :blocks]
        if param is not None:
            own.params[slot, param] = batch.params[slot, param]


def fill(batch: Batch) -> None:
    """Write a step of three rows, of which two have adapters."""
    batch.query_starts[: ROWS + 1] = torch.tensor((0, *LENGTHS)).cumsum(0)
    batch.row_slots[:ROWS], batch.context_lens[:ROWS] = torch.tensor(SLOTS), torch.tensor(CONTEXTS)
    batch.input_ids.copy_(torch.arange(len(batch.input_ids)))
    batch.positions.copy_(batch.input_ids + 7)
    batch.kv_slots.copy_(batch.input_ids + 9)
    batch.block_tables.copy_(torch.arange(batch.block_tables.numel()).view_as(batch.block_tables))
    batch.params[list(SLOTS), Param.ADAPTER] = torch.tensor(ADAPTERS, dtype=torch.int32)
    batch.adapter_places.copy_(torch.tensor((2, 1)))


@pytest.mark.parametrize("kind", list(StepKind))
@pytest.mark.parametrize("adapters", [False, True])
def test_a_follower_has_what_its_part_of_a_step_reads(
    kind: StepKind, adapters: bool, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_follower, "pull_batch", pull_like_the_kernel)
    source, own = (device_follower.DeviceArrays(region, torch.device("cpu")) for _ in range(2))
    pulled = device_follower.PulledBatches(source, own, int(region.geometry["num_slots"]), BLOCK)
    batch = pulled._sources[kind]
    fill(batch)
    tokens = sum(LENGTHS)
    found = pulled.pull(kind, Bucket(tokens, ROWS, decoding=False, adapters=adapters))
    for name, count in {"query_starts": ROWS + 1, "row_slots": ROWS, "context_lens": ROWS, "input_ids": tokens}.items():
        assert torch.equal(getattr(found, name)[:count], getattr(batch, name)[:count])
    for name in ("positions", "kv_slots"):
        assert torch.equal(getattr(found, name)[:tokens], getattr(batch, name)[:tokens])
    for slot, context in zip(SLOTS, CONTEXTS, strict=True):
        blocks = -(-context // BLOCK)
        assert torch.equal(found.block_tables[slot, :blocks], batch.block_tables[slot, :blocks])
    assert found.params[list(SLOTS), Param.ADAPTER].tolist() == (list(ADAPTERS) if adapters else [0, 0, 0])
    assert found.adapter_places.tolist() == ([2, 1] if adapters else [0, 0])
    assert not found.input_ids[tokens:].any(), "more was copied than the step has"
