# SPDX-License-Identifier: Apache-2.0
"""How the GPU engine boots, with everything that needs the device replaced: sizes, the order of captures, the end."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from blink.config import EngineConfig, ModelConfig
from blink.engine import base
from blink.engine.guessing import count_head_bytes
from blink.engine.state import HostState
from blink.errors import ConfigError
from blink.kernels.batch import Batch
from blink.kernels.layer_cache import KvCache
from blink.kernels.lora import WeightParts
from blink.kv_offload import OffloadConfig
from blink.lora_config import LoraConfig
from blink.models.mtp import MtpHead
from blink.models.weights.loader import load_model
from blink.plan.site import Bucket
from blink.region.layout import EngineState
from blink.region.memory import Region, region_path
from blink.runner.run import Runner
from eagle_heads import HEAD_DIM, KV_HEADS, draw_head, write_head
from mtp_layers import write_clockwork as write_mtp_clockwork
from tiny_model import BLOCK_BYTES, write_tiny_model

pytest.importorskip("cuda.core", reason="needs the packages of the gpu extra")
gpu = pytest.importorskip("blink.engine.gpu")
gpu_adapters = pytest.importorskip("blink.engine.gpu_adapters")
gpu_host_tier = pytest.importorskip("blink.engine.gpu_host_tier")

GIB = 1 << 30
Log = list[tuple[int, int, str] | tuple[Bucket, range] | int | str]
STEP_BYTES = 12345
NO_LORA = LoraConfig()


class DeviceTwin:
    """Stands for the state in GPU memory and for the scheduler that runs there; logs what the engine asks of it."""

    log: Log
    num_blocks = 0
    bus_id = "0000:41:00.0"

    def __init__(self, region: Region) -> None:
        self._region = region
        self._state = HostState(region)
        DeviceTwin.num_blocks = int(region.geometry["num_blocks"])

    def array(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._state.tensor(name, dtype)

    def capture(self, index: int, run_step: Callable[[], None]) -> None:
        self.log.append(index)
        run_step()

    def time(self, index: int) -> float:
        self.log.append(f"time {index}")
        return 0.0012 * (index + 1)  # all but the first are longer than a segment and a half

    def capture_segments(self, index: int, segments: list[Callable[[], None]], *, apart: bool) -> None:
        self.log.append(f"segments {index}" + " apart" * apart)
        for run in segments:
            run()

    def prepare(self) -> None:
        self.log.append("prepare")

    def start(self) -> None:
        self.log.append("start")
        self._region.control["state"] = EngineState.STOPPED

    def destroy_graphs(self) -> None:
        self.log.append("destroy graphs")

    def close(self, region: Region) -> None:
        assert region is self._region
        self.log.append("close")


def log_step(model: Runner, batch: Batch, kv_cache: KvCache, size: Bucket, *, scoring: bool = False) -> None:
    del model, batch, kv_cache
    kinds = {"scoring": scoring, **{name: getattr(size, name) for name in ("decoding", "adapters", "skips_guesses")}}
    DeviceTwin.log.append((size.tokens, size.rows, "".join(name for name, is_set in kinds.items() if is_set)))


def log_segment(
    model: Runner, batch: Batch, kv_cache: KvCache, size: Bucket, layers: range, *others: object
) -> str | None:
    """Leave something between the segments of decoding steps, which the next has to be given."""
    del model, batch, kv_cache
    _, before = others
    assert (before == f"up to layer {layers.start}") is (size.decoding and layers.start > 0)
    DeviceTwin.log.append((size, layers))
    return f"up to layer {layers.stop}" if size.decoding else None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Replace the device: what is logged are steps (tokens, rows, kind), segments, captures, start and close.

    Before the captures cuBLAS reserves SMs for the scheduler, the autotuner's file is named, and kernels are compiled.
    """
    DeviceTwin.log = []
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    monkeypatch.setattr(gpu, "DeviceState", lambda region, device: DeviceTwin(region))  # noqa: ARG005
    monkeypatch.setattr(gpu, "DeviceScheduler", lambda state, plan_words: state)  # noqa: ARG005
    monkeypatch.setattr(gpu.cublas, "reserve_sm", lambda: DeviceTwin.log.append("reserve SM"))
    monkeypatch.setattr(gpu.autotuner, "tuning", lambda path: nullcontext(DeviceTwin.log.append(path.name)))
    monkeypatch.setattr(gpu, "report_energy", lambda region, bus_id: DeviceTwin.log.append(f"energy {bus_id}"))  # noqa: ARG005
    monkeypatch.setattr(gpu, "compile_ahead", lambda run: DeviceTwin.log.append("compile ahead"))  # noqa: ARG005
    monkeypatch.setattr(
        base,
        "load_model",
        lambda config, device, dtype: load_model(config, torch.device("cpu"), torch.float32),  # noqa: ARG005
    )
    monkeypatch.setattr(Runner, "forward", log_step)
    monkeypatch.setattr(Runner, "forward_segment", log_segment)
    for name, value in {"current_device": 0, "memory_allocated": 100, "max_memory_allocated": 100 + STEP_BYTES}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return DeviceTwin.log


def boot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, free: int, total: int, lora: LoraConfig = NO_LORA, **more: Any
) -> tuple[base.Engine, str]:
    """Boot with a small model, which is written to the folder unless there is one."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    region = f"boot-{os.getpid()}-{secrets.token_hex(3)}"
    if not folder.exists() or not any(folder.iterdir()):
        write_tiny_model(folder, vocab_size=96, max_position_embeddings=128, num_hidden_layers=2)
    model = ModelConfig(model=str(folder), load_format="dummy")
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "gpu_memory_utilization": 0.5}
    return gpu.GpuEngine(EngineConfig(model=model, region=region, lora=lora, **sizes, **more)), region


def test_the_largest_graph_is_measured_and_captured_first_and_the_end_frees_the_device(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 77 * 2 * BLOCK_BYTES + 5  # half of all, less what is in use, the largest step and 1 GiB for graphs
    engine, region = boot(tmp_path, monkeypatch, free=4 * GIB, total=2 * (3 * GIB - STEP_BYTES - room))
    sizes = [(count, count, "decoding") for count in (1, 2, 4)] + [(tokens, 4, "") for tokens in (16, 32, 40)]
    sizes += [(tokens, 4, "scoring") for tokens in (16, 32, 40)]
    expected: Log = [(40, 4, "scoring"), "reserve SM", "products.json", "compile ahead"]
    for index in (5, 8, 4, 7, 3, 6, 2, 1, 0):
        expected += [sizes[index], index, sizes[index]]
    expected += [f"time {index}" for index in (0, 0, 1, 2, 3, 4, 5, 2) for _ in "ab"]  # at last with a long context
    for index in (5, 4, 3, 2, 1):
        tokens, rows, kind = sizes[index]
        halves: Log = [(Bucket(tokens, rows, kind == "decoding"), range(layer, layer + 1)) for layer in range(2)]
        expected += [*halves, f"segments {index}" + " apart" * (kind == "decoding"), *halves]
    assert log == expected
    assert DeviceTwin.num_blocks == 77
    assert engine.run() == 0
    assert log[len(expected) :] == ["prepare", "start", "energy 0000:41:00.0", "destroy graphs", "close"]
    assert not region_path(region).exists()


def test_steps_with_adapters_have_graphs_of_their_own_behind_the_others(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_adapters, "Uploader", lambda: lambda target, source: target.copy_(source))
    lora = LoraConfig(enable_lora=True, max_loras=2)
    engine, _ = boot(tmp_path, monkeypatch, free=4 * GIB, total=4 * GIB, lora=lora)
    kinds = {index: step for step, index in itertools.pairwise(log) if isinstance(index, int)}
    assert log[0] == (40, 4, "scoringadapters")
    assert len(kinds) == 18
    for index in range(9):
        plain = kinds[index]
        assert isinstance(plain, tuple) and kinds[index + 9] == (*plain[:2], f"{plain[-1]}adapters")
    buckets = [entry[0] for entry in log if isinstance(entry, tuple)]
    assert {bucket.adapters for bucket in buckets if isinstance(bucket, Bucket)} == {False, True}
    assert engine.run() == 0


def test_steps_with_guesses_have_graphs_of_their_own_and_blocks_behind_the_others(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three guesses of 16 rows take two blocks of each; what they and kept residuals take is not the KV cache's."""
    head = write_head(tmp_path / "head", draw_head(96, range(1, 96, 3), seed=1), (0, 1, 1))
    told = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    own_bytes = KV_HEADS * HEAD_DIM * 2 * 16 * 2  # of a block in the head's layer, as BLOCK_BYTES
    room = 77 * (2 * BLOCK_BYTES + own_bytes) + 2 * 16 * own_bytes + 2 * 40 * 32 * 4 + 5
    free, total = 4 * GIB, 2 * (3 * GIB - STEP_BYTES - room)
    DeviceTwin.log.clear()
    engine, _ = boot(tmp_path / "model", monkeypatch, free=free, total=total, speculative_config=told)
    kinds = {index: step for step, index in itertools.pairwise(log) if isinstance(index, int)}
    plain = len(kinds) // 2
    assert 2 * plain == len(kinds) == 2 * (5 + 3 + 3)
    for index in range(plain):
        own, more = kinds[index], kinds[index + plain]
        assert isinstance(more, tuple) and own == (*more[:2], f"{more[-1]}skips_guesses")
    assert DeviceTwin.num_blocks == 77
    cache = engine._kv_cache
    assert [one.num_blocks for one in cache] == [77, 77, 77 + 2 * 16]
    assert engine.run() == 0


def test_a_draft_layer_has_such_graphs_and_blocks_too(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of three layers, of which two are recurrent."""
    monkeypatch.setattr(gpu_adapters, "Uploader", lambda: lambda target, source: target.copy_(source))
    model, told = write_mtp_clockwork(tmp_path, 96, noise=0), {"method": "mtp", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"speculative_config": json.dumps(told), "num_gpu_blocks_override": 77}
    engine, _ = boot(model, monkeypatch, free=4 * GIB, total=4 * GIB, **options)
    kinds = [step[-1] for step, index in itertools.pairwise(log) if isinstance(index, int) and isinstance(step, tuple)]
    guessing = [kind for kind in kinds if "skips_guesses" not in str(kind)]
    assert 2 * len(guessing) == len(kinds) > 10
    assert [engine._kv_cache[layer].num_blocks for layer in (1, 3)] == [77, 77 + 2 * 16]
    assert isinstance(engine._model.head, MtpHead)
    of_guesses = 2 * 16 * 16 * 2 * 2 * 16 * 2  # 32 blocks of 16 tokens, each with 2 keys and 2 values of 16 halves
    assert count_head_bytes(engine._model, engine._config) == of_guesses
    with pytest.raises(ConfigError, match="leave out --enable-lora"):
        boot(model, monkeypatch, free=4 * GIB, total=4 * GIB, lora=LoraConfig(enable_lora=True), **options)
    assert engine.run() == 0


def test_copies_are_captured_only_where_the_scheduler_orders_them(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = gpu_adapters.GpuAdapters

    def copy(places: list[Any], order: torch.Tensor) -> None:
        log.append(f"copy to {len(places)} GPUs by {len(order)} words")

    monkeypatch.setattr(gpu_adapters, "copy_ordered", copy)
    order, like, scheduler = torch.zeros(4, dtype=torch.int32), torch.empty(0), Mock()
    for upload in (lambda target, source: target.copy_(source), None):
        stores = [memory({1: WeightParts((32, 16), (slice(0, 32),))}, 2, 2, 16, like, upload) for _ in range(2)]
        gpu_adapters.capture_copies(scheduler, stores, order)
    assert log == ["copy to 2 GPUs by 4 words"]
    scheduler.capture_copy.assert_called_once()
    scheduler.capture_copy.call_args.args[0]()
    assert log == ["copy to 2 GPUs by 4 words"] * 2


def test_each_step_begins_with_the_copies_of_blocks(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = OffloadConfig(kv_offloading_size=1 / 1024)
    monkeypatch.setattr(gpu_host_tier, "let_gpu_read", lambda *_: None)
    monkeypatch.setattr(gpu_host_tier, "copy_listed", lambda *_: log.append("copies"))
    engine, _ = boot(tmp_path, monkeypatch, free=4 * GIB, total=4 * GIB, num_gpu_blocks_override=77, kv_offload=offload)
    begins = [step for copies, step in itertools.pairwise(log) if copies == "copies"]
    assert len(begins) > 30 and all(isinstance(step, tuple) for step in begins)
    assert engine.run() == 0


def test_a_gpu_without_room_for_a_block_is_refused(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="4 of 10 GiB are in use; raise --gpu-memory-utilization"):
        boot(tmp_path, monkeypatch, free=6 * GIB, total=10 * GIB)
    assert log == [(40, 4, "scoring")]
