# SPDX-License-Identifier: Apache-2.0
"""A GPU engine that sleeps gives its memory back, and says the same when it wakes up, or what newer weights say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM
from blink.engine.gpu_weights import GpuWeights
from blink.engine.mapped_memory import MappedMemory
from blink.errors import BadRequestError, EngineUnavailableError
from model_families import save_model
from quantized_checkpoints import write_checkpoints
from turned_weights import generate, turn_weights
from weight_trainer import list_weights

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 30,
    "device": "cuda",
    "enable_sleep_mode": True,
}


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **(OPTIONS | options))


def boot(path: Path, **options: Any) -> list[int]:
    with open_llm(path, **options) as llm:
        return generate(llm)


def test_mapped_memory_comes_back_at_its_addresses() -> None:
    device, size = torch.device("cuda", torch.cuda.current_device()), 256 << 20
    memory = MappedMemory(size, device)
    view = memory.view()
    assert view.device == device and view.dtype == torch.uint8 and len(view) >= size
    view.fill_(3)
    assert int(view[-1]) == 3
    for _ in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        memory.unmap()
        assert torch.cuda.mem_get_info()[0] - before >= size
        memory.map()
        assert memory.view().data_ptr() == view.data_ptr()
        view.fill_(5)
        assert int(view.sum(dtype=torch.int64)) == 5 * len(view)


class Site:
    """Two models on disk, and their tokens by an engine that does not sleep."""

    def __init__(self, folder: Path) -> None:
        self.first = folder / "first"
        save_model("llama-3.1", self.first)
        self.second = turn_weights(self.first, folder / "second")
        options: dict[str, Any] = {"dtype": "float32", "enable_sleep_mode": False}
        self.of_first, self.of_second = (boot(path, **options) for path in (self.first, self.second))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("sleep"))


@pytest.fixture
def llm(site: Site) -> Iterator[LLM]:
    with open_llm(site.first, dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize("level", [1, 2])
def test_an_llm_that_slept_says_the_same(site: Site, llm: LLM, level: int) -> None:
    assert generate(llm) == site.of_first
    for _ in range(3):
        llm.sleep(level)
        with pytest.raises(EngineUnavailableError, match="wake_up"):
            generate(llm)
        llm.wake_up()
        assert generate(llm) == site.of_first


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "awq"])
def test_weights_in_any_format_are_filled_again(name: str, tmp_path: Path) -> None:
    if name == "bf16":
        path = tmp_path / "first"
        save_model("qwen3_moe", path)
    else:
        path, _ = write_checkpoints(tmp_path, name)
    with open_llm(path, dtype="bfloat16") as llm:
        wanted = generate(llm)
        llm.sleep(2)
        llm.wake_up()
        assert generate(llm) == wanted


def test_weights_of_a_sleeper_are_those_that_it_was_given(site: Site, llm: LLM) -> None:
    llm.sleep(2)
    llm.update_weights_from_disk(str(site.second))
    llm.wake_up(["kv_cache"])
    assert generate(llm) == site.of_second
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.update_weights_from_tensor(list_weights(site.first))
    with pytest.raises(BadRequestError, match="KV cache sleeps"):
        llm.resume()
    llm.wake_up(["kv_cache"])
    assert generate(llm) == site.of_first


def test_sleep_frees_memory_and_cycles_leave_it_as_it_was(
    site: Site, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is asked when the host has it, before and after the KV cache is freed."""
    free_cache, seen = GpuWeights.free_kv_cache, list[tuple[int, int]]()

    def count(run: Callable[[], None]) -> int:
        run()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def look(self: GpuWeights) -> None:
        seen.append((count(lambda: None), count(lambda: free_cache(self))))

    monkeypatch.setattr(GpuWeights, "free_kv_cache", look)
    for index in range(20):
        llm.sleep(1 + index % 2)
        llm.wake_up()
    assert all(after - before > 900 << 20 for before, after in seen), seen
    assert seen[-1][0] >= seen[2][0] - (2 << 20), seen
    assert generate(llm) == site.of_first
