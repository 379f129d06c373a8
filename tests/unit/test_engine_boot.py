# SPDX-License-Identifier: Apache-2.0
"""What every engine does around its steps: size the cache, serve, drain, report a failure, free what it took."""

from __future__ import annotations

import gc
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from blink.config import EngineConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.engine.thread import EngineThread
from blink.errors import ConfigError
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.plan.site import Bucket
from blink.region.layout import EngineState, ErrorCode
from blink.region.memory import open_region, region_path
from blink.runner.run import Runner
from blink.sampling_params import SamplingParams
from tiny_model import BLOCK_BYTES, write_tiny_model

Kind = TypeVar("Kind", bound=CpuEngine)


@pytest.fixture
def region() -> Iterator[str]:
    name = f"boot-{os.getpid()}-{secrets.token_hex(3)}"
    yield name
    region_path(name).unlink(missing_ok=True)


def boot(kind: type[Kind], folder: Path, region: str, *, max_model_len: int = 0, **options: Any) -> Kind:
    path = write_tiny_model(folder, vocab_size=96, max_position_embeddings=128)
    model = ModelConfig(model=str(path), load_format="dummy", max_model_len=max_model_len)
    small: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, **options}
    return kind(EngineConfig(model=model, region=region, device="cpu", **small))


class Running:
    """An engine whose run() goes on in a thread, and what it returned or raised."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self.status: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.status = self._engine.run()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()


def submit(region: str) -> EngineClient:
    """Attach to the engine and ask it for three tokens."""
    client = EngineClient(ShmConnector(region), engine_timeout=60.0)
    deadline = time.monotonic() + 60
    while not client.ready:
        assert time.monotonic() < deadline, client.unavailable_reason
        client.tick()
        time.sleep(0.01)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    client.submit(np.arange(5, dtype=np.int32), params, seed=0)
    return client


def wait_for_end(client: EngineClient) -> list[int]:
    """Return the tokens of the one sequence."""
    tokens: list[int] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client.tick()
        for completion in client.drain():
            if completion["kind"] == 2:
                tokens.append(int(completion["token"]))
            if completion["finish_reason"]:
                return tokens
        time.sleep(0.005)
    raise AssertionError("the sequence did not end")


def test_a_drained_engine_ends_well_and_takes_its_region_away(tmp_path: Path, region: str) -> None:
    engine = boot(CpuEngine, tmp_path, region)
    assert not region_path(region).exists()
    running = Running(engine)
    client = submit(region)
    assert len(wait_for_end(client)) == 3
    engine.drain()
    running.join()
    assert (running.status, running.error) == (0, None)
    assert not region_path(region).exists()
    client.close()


def test_a_deleted_region_is_restored_and_serves_on(tmp_path: Path, region: str) -> None:
    engine = boot(CpuEngine, tmp_path, region)
    running = Running(engine)
    submit(region).close()
    region_path(region).unlink()
    client = submit(region)
    assert len(wait_for_end(client)) == 3
    engine.drain()
    running.join()
    assert (running.status, running.error) == (0, None)
    client.close()


def test_an_engine_whose_region_was_replaced_ends_and_leaves_the_other_file(tmp_path: Path, region: str) -> None:
    running = Running(boot(CpuEngine, tmp_path, region))
    submit(region).close()
    other = region_path(f"{region}-other")
    other.write_bytes(b"another's")
    other.rename(region_path(region))
    running.join()
    assert (running.status, running.error) == (1, None)
    assert region_path(region).read_bytes() == b"another's"
    assert [*region_path(region).parent.glob(f"{region_path(region).name}*")] == [region_path(region)]


def test_a_cache_larger_than_the_memory_is_refused_before_any_is_taken(tmp_path: Path, region: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        boot(CpuEngine, tmp_path, region, num_gpu_blocks_override=0, kv_cache_memory_bytes=1 << 50)
    assert not [*region_path(region).parent.glob(f"{region_path(region).name}*")]


@pytest.mark.parametrize(("num_blocks", "length"), [(4, 64), (64, 128)])
def test_the_longest_sequence_may_be_what_fits(tmp_path: Path, region: str, num_blocks: int, length: int) -> None:
    engine = boot(CpuEngine, tmp_path, region, max_model_len=-1, num_gpu_blocks_override=num_blocks)
    running = Running(engine)
    client = submit(region)
    assert client.info is not None and client.info.max_model_len == length
    assert len(wait_for_end(client)) == 3
    engine.drain()
    running.join()
    client.close()


def test_without_that_a_cache_that_is_too_small_is_refused(tmp_path: Path, region: str) -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        boot(CpuEngine, tmp_path, region, num_gpu_blocks_override=4)


class Failing(CpuEngine):
    def _fill_costs(self) -> None:
        """Fail later."""

    def _run_step(self, size: Bucket, *, scoring: bool = False) -> None:
        del scoring
        raise RuntimeError(f"no step of {size}")


def test_a_model_that_fails_ends_the_engine_with_the_error_in_its_region(tmp_path: Path, region: str) -> None:
    running = Running(boot(Failing, tmp_path, region))
    client = submit(region)
    running.join()
    assert (running.status, running.error) == (1, None)
    left = open_region(region)
    assert left.control_word("state") == EngineState.FAILED
    assert left.control_word("error_code") == ErrorCode.STEP_FAILED
    client.close()


class LosingRank(CpuEngine):
    rank_timeout = 1.0


def test_a_rank_that_hangs_ends_the_engine_with_its_number_in_the_region(
    tmp_path: Path, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = boot(LosingRank, tmp_path, region, tensor_parallel_size=2, cpu_threads=2)
    is_over, forward = threading.Event(), Runner.forward

    def hang(self: Runner, *sizes: Any, **kinds: Any) -> None:
        if self.model.spec.shard.rank == 1:
            assert is_over.wait(120)
        else:
            forward(self, *sizes, **kinds)

    monkeypatch.setattr(Runner, "forward", hang)
    running = Running(engine)
    client = submit(region)
    running.join()
    assert (running.status, running.error) == (1, None)
    left = open_region(region)
    assert left.control_word("state") == EngineState.FAILED
    assert (left.control_word("error_code"), left.control_word("error_detail")) == (ErrorCode.RANK_LOST, 1)
    client.tick()
    assert "RANK_LOST" in client.unavailable_reason
    is_over.set()
    client.close()


class Broken(CpuEngine):
    ends = 0

    def _advance(self) -> bool:
        raise OSError("the host is broken")

    def _end(self) -> None:
        self.ends += 1
        super()._end()


def test_an_error_of_the_host_still_ends_the_scheduler(tmp_path: Path, region: str) -> None:
    engine = boot(Broken, tmp_path, region)
    running = Running(engine)
    running.join()
    assert str(running.error) == "the host is broken"
    assert engine.ends == 1
    seen = open_region(region)
    before = seen.heartbeat()
    time.sleep(0.2)
    assert seen.heartbeat() == before


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"num_gpu_blocks_override": 11}, 11),
        ({"num_gpu_blocks_override": 11, "kv_cache_memory_bytes": 20 * BLOCK_BYTES}, 11),
        ({"num_gpu_blocks_override": 0, "kv_cache_memory_bytes": 20 * BLOCK_BYTES + 1}, 20),
        ({"num_gpu_blocks_override": 0}, 33),
    ],
)
def test_the_cache_has_the_blocks_configured_or_those_that_fit(
    tmp_path: Path, region: str, options: dict[str, int], num_blocks: int
) -> None:
    class Measured(CpuEngine):
        def _measure_room(self) -> int:
            return 34 * BLOCK_BYTES - 1

    engine = boot(Measured, tmp_path, region, **options)
    running = Running(engine)
    submit(region).close()
    assert int(open_region(region).geometry["num_blocks"]) == num_blocks
    engine.stop()
    running.join()


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [({}, 256), ({"max_num_seqs": 300}, 300), ({"max_num_seqs": 300, "max_num_batched_tokens": 2048}, 2048)],
)
def test_a_step_of_the_cpu_engine_is_short_unless_it_is_told_otherwise(
    tmp_path: Path, region: str, options: dict[str, int], num_tokens: int
) -> None:
    running = Running(engine := boot(CpuEngine, tmp_path, region, **options))
    submit(region).close()
    geometry = open_region(region).geometry
    assert int(geometry["max_num_batched_tokens"]) == num_tokens
    assert geometry["graphs"][int(geometry["num_graphs"]) - 1].tolist()[0] == num_tokens
    engine.stop()
    running.join()


def test_a_step_holds_no_more_than_all_sequences_together(tmp_path: Path, region: str) -> None:
    running = Running(engine := boot(CpuEngine, tmp_path, region, max_num_seqs=1, max_num_batched_tokens=512))
    client = submit(region)
    assert len(wait_for_end(client)) == 3
    geometry = open_region(region).geometry
    assert int(geometry["max_num_batched_tokens"]) == int(geometry["max_model_len"]) < 512
    client.close()
    engine.stop()
    running.join()


def count_descriptors(region: str) -> int:
    """Return how many of this process's descriptors are of a region's file, deleted or not."""
    folder = Path("/proc/self/fd")
    return sum(f"/blink-{region}" in str(each.readlink()) for each in folder.iterdir() if each.is_symlink())


def test_an_engine_that_ends_in_this_process_gives_back_its_region(tmp_path: Path, region: str) -> None:
    path = write_tiny_model(tmp_path, vocab_size=96, max_position_embeddings=128)
    # Without a tokenizer no warning is logged, whose record would keep the frames of the boot.
    model = ModelConfig(model=str(path), load_format="dummy", skip_tokenizer_init=True)
    config = EngineConfig(model=model, region=region, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4)
    engine = EngineThread(config)
    assert count_descriptors(region) > 0
    engine.stop()
    del engine  # a mapping goes with its last view
    gc.collect()
    assert count_descriptors(region) == 0


def test_an_engine_that_cannot_boot_gives_back_its_region(
    tmp_path: Path, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(CpuEngine, "_allocate_kv_cache", fail)
    path = write_tiny_model(tmp_path, vocab_size=96, max_position_embeddings=128)
    model = ModelConfig(model=str(path), load_format="dummy", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="no room") as refusal:
        CpuEngine(EngineConfig(model=model, region=region, device="cpu", num_gpu_blocks_override=64))
    del refusal  # its frames have the mapping's views
    gc.collect()
    assert count_descriptors(region) == 0
