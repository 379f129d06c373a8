# SPDX-License-Identifier: Apache-2.0
"""Orders about weights that are written in place, with the scheduler away meanwhile: as a GPU engine carries them out.

The model lies in the host's memory, and the scheduler is on a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.config import EngineConfig, ModelConfig
from blink.engine.device_leave import without_scheduler
from blink.engine.model_control import ModelControl
from blink.engine.sleeping_memory import SleepingMemory
from blink.errors import BadRequestError, ConfigError
from blink.models.eagle import EagleHead
from blink.models.layer_weights import list_weights
from blink.models.weights.loader import load_model, open_model
from blink.models.weights.overwriting import Overwrite
from blink.offline.tensors import stream_tensors
from blink.region.layout import Absent
from fake_memory import FakeMemory
from harness import expected_tokens, run_until_finished, running, small_config, submit
from model_families import save_model
from resident import Resident
from turned_weights import drop_tensor, turn_weights
from weight_trainer import list_weights as list_files

pytest.importorskip("cuda.core", reason="needs the packages of the gpu extra")
gpu_weights = pytest.importorskip("blink.engine.gpu_weights")
CPU, PROMPT = torch.device("cpu"), [3, 1, 4, 1, 5]


class Models:
    """Models on disk."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = folder / "first", folder / "second"
        save_model("llama-3.1", self.first)
        turn_weights(self.first, self.second)
        self.damaged = drop_tensor(self.first, folder / "damaged", "layers.2.mlp.down")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("control"))


def config_of(path: Path) -> ModelConfig:
    return ModelConfig(model=str(path), dtype="bfloat16")


def weights_of(path: Path) -> list[Tensor]:
    model = load_model(config_of(path), CPU, torch.bfloat16)
    return [one for one in list_weights(model.layers) if isinstance(one, Tensor)]


class Engine:
    """A scheduler that serves, a model, and the thread that carries out what is asked of it."""

    def __init__(self, models: Models, resident: Resident, *, sleeps: bool) -> None:
        self.resident, self.region = resident, resident.harness.region
        self.parts = None
        if sleeps:
            self.parts = gpu_weights.SleepingParts(*(SleepingMemory(FakeMemory, CPU) for _ in range(2)))
        source = open_model(config_of(models.first), CPU, torch.bfloat16)
        self.model = source.load(None if self.parts is None else self.parts.weights.place)
        leave = partial(without_scheduler, self.region, resident)
        config = EngineConfig(region="control", model=config_of(models.first))
        self.control = ModelControl(self.region, gpu_weights.GpuWeights(self.model, self.parts), config, CPU, leave)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.control.run_jobs(0.01)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.control.close()

    def ask(self, order: str, **values: object) -> None:
        self.control.answer({"order": order, "values": values}, BytesIO())

    def update(self, path: Path) -> None:
        self.ask("update", path=str(path), load_format="", clears_cache=True)

    def has(self, path: Path) -> bool:
        own = (one for one in list_weights(self.model.layers) if isinstance(one, Tensor))
        return all(map(torch.equal, own, weights_of(path)))

    def serves(self) -> bool:
        """Whether the scheduler is there and computes a sequence."""
        self.resident.end()
        harness = self.resident.harness
        pair = harness.frontend()
        sequence = submit(harness, pair, PROMPT, max_tokens=5, ignore_eos=True)
        inbox = self.resident.inbox
        run_until_finished(harness, inbox, [pair], [sequence])
        self.resident.start()
        return inbox.tokens(sequence) == expected_tokens(PROMPT, 5, harness.vocab_size)


@pytest.fixture(params=[False, True], ids=["awake", "sleeps"])
def engine(models: Models, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with running(small_config()) as harness:
        resident = Resident(harness)
        resident.start()
        engine = Engine(models, resident, sleeps=request.param)
        yield engine
        engine.close()
        resident.end()


def test_weights_come_from_disk_and_the_engine_serves_on(models: Models, engine: Engine) -> None:
    for path in (models.second, models.first):
        engine.update(path)
        assert engine.has(path) and engine.region.control_word("absent") == 0
        assert engine.serves()


def test_tensors_come_over_those_of_the_files(models: Models, engine: Engine) -> None:
    stream = BytesIO(b"".join(stream_tensors(list_files(models.second))))
    engine.control.answer({"order": "begin", "values": {}}, BytesIO())
    engine.control.answer({"order": "receive", "values": {}}, stream)
    assert engine.has(models.first)
    engine.ask("commit", clears_cache=True)
    assert engine.has(models.second) and engine.serves()


def test_a_checkpoint_that_is_not_whole_is_refused_and_nothing_changes(models: Models, engine: Engine) -> None:
    with pytest.raises(BadRequestError, match=r"layers\.2\.mlp\.down"):
        engine.update(models.damaged)
    assert engine.has(models.first) and engine.region.control_word("absent") == 0
    assert engine.serves()


def test_a_draft_head_is_refused_by_name_and_nothing_changes(models: Models, engine: Engine) -> None:
    engine.model.head = object.__new__(EagleHead)
    with pytest.raises(BadRequestError, match="draft head neither sleeps nor takes other weights"):
        engine.update(models.second)
    if engine.parts is not None:
        with pytest.raises((BadRequestError, ConfigError), match="draft head neither sleeps"):
            engine.ask("sleep", level=2)
    assert engine.has(models.first) and engine.region.control_word("absent") == 0


def test_an_update_that_breaks_off_leaves_the_weights_undefined_until_a_whole_one(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = Overwrite.take, list[int]()

    def break_off(self: Overwrite, pairs: list[tuple[Tensor, Tensor]]) -> None:
        taken.append(len(pairs))
        if len(taken) > 3:
            raise ConfigError("the disk is gone")
        take(self, pairs)

    monkeypatch.setattr(Overwrite, "take", break_off)
    with pytest.raises(BadRequestError, match="the disk is gone"):
        engine.update(models.second)
    assert engine.region.control_word("absent") == Absent.UNDEFINED and engine.control.is_holding
    assert not engine.resident.has_ended()  # it answers frontends, and launches nothing
    monkeypatch.setattr(Overwrite, "take", take)
    engine.update(models.second)
    assert engine.has(models.second) and engine.region.control_word("absent") == 0
    assert engine.serves()


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_an_engine_that_cannot_sleep_says_so_and_serves_on(models: Models, engine: Engine) -> None:
    for order in ("check_sleep", "sleep"):
        with pytest.raises((BadRequestError, ConfigError), match="does not sleep"):
            engine.ask(order, **({"level": 1} if order == "sleep" else {}))
    assert not engine.control.is_holding and engine.has(models.first) and engine.serves()


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_an_engine_sleeps_wakes_up_and_takes_weights_meanwhile(models: Models, engine: Engine) -> None:
    engine.ask("check_sleep")
    assert engine.parts is not None
    cells = engine.parts.cells.allocate((64,), torch.float16, CPU)
    sleeps = (1, models.first, False), (2, models.first, False), (2, models.second, True), (1, models.second, False)
    for level, path, updates in (*sleeps, (1, models.first, True)):
        engine.ask("sleep", level=level)
        assert engine.control.is_holding
        assert not engine.parts.cells.is_mapped and not engine.parts.weights.is_mapped
        if updates:
            engine.update(path)
        engine.ask("wake_up", tags=["weights"])
        assert engine.control.is_holding
        engine.ask("wake_up", tags=["kv_cache"])
        assert engine.has(path) and cells.count_nonzero() == 0 and engine.region.control_word("absent") == 0
        assert engine.serves()
