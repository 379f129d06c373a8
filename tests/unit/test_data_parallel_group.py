# SPDX-License-Identifier: Apache-2.0
"""What several engines say together, and which of them gets a sequence, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blink.api.observe.metric_store import Worker
from blink.api.observe.metrics import NUM_VALUES, MetricView, num_engines_of, num_values
from blink.api.service import ApiService
from blink.cli.replicas import deal_gpus, replica_configs, start_engines
from blink.cli.serve import resolve_serve
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.errors import BlinkError, ConfigError, EngineUnavailableError, OverloadedError
from blink.link.client import EngineClient
from blink.link.group import EngineGroup, add_stats
from blink.link.queue_pair import NO_ORIGIN
from blink.offline.options import read_options
from blink.region.files import engine_regions, server_region
from blink.region.outside import HASH_KEY_VARIABLE
from blink.request.engine_tables import EngineTables, engine_of
from blink.request.planner import PlannedSequence
from blink.request.table import Observer
from blink.sampling_params import SamplingParams
from blink.text.assets import load_assets
from blink.text.generation import Generation
from blink.text.prompt import Prompt
from blink.text.tokenizer import NoTokenizer
from blink.view.samples import Samples
from fake_engine import ENGINE, FakeEngine


class Replica(FakeEngine):
    """One of several engines; `running` is what it publishes."""

    silent_seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = True
        self.running = 0
        self.loss: str | None = None

    def queue(self) -> tuple[int, int]:
        return self.running, 0

    def tick(self) -> str | None:
        lost, self.loss = self.loss, None
        self.ready = lost is None
        return lost


class Request:
    """The owner of sequences."""

    arrived, flow = 0.0, 0

    def __init__(self) -> None:
        self.error: BlinkError | None = None

    def note_change(self, generation: Generation) -> None:
        del generation

    def flush(self) -> None:
        pass

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        del reason
        self.error = error


def tables_of(*engines: FakeEngine) -> EngineTables:
    group = EngineGroup(cast(list[EngineClient], list(engines)))
    return EngineTables(group, [Observer() for _ in engines], lambda call: call())


def planned(*blocks: int) -> PlannedSequence:
    hashes = b"".join(block.to_bytes(16, "little") for block in blocks)
    params = SamplingParams()
    prompt = Prompt(np.zeros(16 * len(blocks) + 1, np.int32), hashes, NO_ORIGIN)
    return PlannedSequence(prompt, params, 0, (), Generation(0, NoTokenizer(), params, ()))


def test_a_full_engine_passes_a_sequence_on_and_full_ones_refuse_it() -> None:
    engines = [Replica(), Replica()]
    tables = tables_of(*engines)
    engines[1].running = 5
    engines[0].refusal = OverloadedError("full")
    assert engine_of(tables.submit(Request(), planned())) == 1
    engines[1].refusal = OverloadedError("full too")
    with pytest.raises(OverloadedError):
        tables.submit(Request(), planned())
    assert tables.num_open == tables.num_waiting == 1


def test_an_engine_that_is_not_ready_gets_nothing() -> None:
    engines = [Replica(), Replica()]
    tables = tables_of(*engines)
    engines[0].ready, engines[0].unavailable_reason = False, "it boots"
    assert {engine_of(tables.submit(Request(), planned())) for _ in range(4)} == {1}
    engines[1].ready = False
    with pytest.raises(EngineUnavailableError, match="it boots"):
        tables.submit(Request(), planned())


def test_a_lost_engine_fails_its_own_requests_alone() -> None:
    engines = [Replica(), Replica()]
    tables = tables_of(*engines)
    requests = [Request() for _ in range(6)]
    given = [engine_of(tables.submit(request, planned())) for request in requests]
    assert sorted(given) == [0, 0, 0, 1, 1, 1]
    engines[1].loss = "killed"
    assert tables.tick(0) is None and tables.tick(1) == "killed"
    for engine, request in zip(given, requests, strict=True):
        assert (request.error is not None) == (engine == 1)
        assert engine == 0 or "killed" in str(request.error)


def test_a_cancelled_sequence_is_cancelled_where_it_runs() -> None:
    engines = [Replica(), Replica()]
    tables = tables_of(*engines)
    sequences = [tables.submit(Request(), planned()) for _ in range(4)]
    ours = [each for each in sequences if engine_of(each) == 1]
    tables.cancel(ours[0], "abort")
    tables.cancel(ours[0], "abort")  # which it is already
    assert engines[0].cancelled == [] and len(engines[1].cancelled) == 1 and tables.num_open == 3


def test_what_an_engine_has_cached_is_forgotten_with_it() -> None:
    engines = [Replica(), Replica()]
    tables = tables_of(*engines)
    prompt = planned(*range(1, 20))
    first = engine_of(tables.submit(Request(), prompt))
    assert engine_of(tables.submit(Request(), prompt)) == first  # though it has one more
    engines[first].loss = "killed"
    tables.tick(first)
    engines[first].ready = True
    engines[first].running = 1
    assert engine_of(tables.submit(Request(), prompt)) != first


def test_a_group_keeps_the_limits_of_all_and_has_the_room_of_those_that_are_ready() -> None:
    engines = [Replica(), Replica(), Replica()]
    engines[1].info = replace(ENGINE, max_model_len=100, can_constrain=False)
    group = EngineGroup(cast(list[EngineClient], engines))
    info = group.require_info()
    assert (info.max_model_len, info.max_sequences, info.can_constrain) == (100, 3 * ENGINE.max_sequences, False)
    engines[1].ready = engines[2].ready = False
    assert group.info == ENGINE and group.ready
    engines[0].ready, engines[0].unavailable_reason = False, "it is gone"
    assert group.info is None and not group.ready
    with pytest.raises(EngineUnavailableError, match="it is gone"):
        group.require_info()


def test_bodies_are_measured_by_the_engine_of_now() -> None:
    replica = Replica()
    group = EngineGroup(cast(list[EngineClient], [replica]))
    config = FrontendConfig()
    service = ApiService(config, load_assets(config), cast(Any, SimpleNamespace(group=group)))
    first = service.bounds_of(b"a")
    assert first.engine == ENGINE and first.owner == b"a" and first.is_hurried
    assert service.bounds_of(b"a") is first and service.bounds_of(b"b").owner == b"b"
    replica.info = replace(ENGINE, max_model_len=ENGINE.max_model_len + 1)
    assert service.bounds_of(b"a").engine == replica.info
    service.is_draining = True
    assert service.bounds_of(b"a").engine is None


def test_statistics_add_up_except_for_what_describes_an_engine() -> None:
    one = {"num_steps": 3, "generation_tokens": 10, "token_energy_uj": 100, "block_size": 16, "prefix_caching": 1}
    two = {**one, "num_steps": 4, "generation_tokens": 30, "token_energy_uj": 200}
    assert add_stats([one, {}, two]) == {
        "num_steps": 7,
        "generation_tokens": 40,
        "token_energy_uj": 175,
        "block_size": 16,
        "prefix_caching": 1,
    }
    assert add_stats([one]) == one and add_stats([{}, {}]) == {}


def test_each_engine_has_its_samples_and_a_name_occurs_once() -> None:
    values = [0.0] * num_values(2)
    values[0], values[(num_values(2) - num_values(1))] = 3, 4  # vllm:request_success of reason stop
    worker = Worker(1, is_alive=True, values=memoryview(bytearray(8 * len(values))).cast("d"))
    worker.values[:] = memoryview(bytearray(np.array(values).tobytes())).cast("d")
    store = cast(Any, type("Store", (), {"workers": lambda _: [worker]})())
    view = MetricView(store, [lambda: {"num_running": 1, "num_blocks": 9, "energy_mj": 5}, lambda: {"num_running": 2}])
    families = [*view.collect()]
    assert len({family.name for family in families}) == len(families)
    samples = Samples(families, 0.0)
    for name, first, second in (
        ("vllm:num_requests_running", 1, 2),
        ("blink:engine_up", 1, 1),
        ("vllm:cache_config_info", 1, 0),
        ("blink:energy_joules_total", 5e-3, 0),
        ("vllm:request_success_total", 3, 4),
    ):
        assert (samples.value(name, engine="0"), samples.value(name, engine="1")) == (first, second), name
    assert samples.by_label("blink:frontend_sequences", "frontend") == {"1": 0}


def test_the_number_of_engines_is_known_by_the_numbers_of_a_worker() -> None:
    assert [num_engines_of(num_values(count)) for count in (1, 2, 8)] == [1, 2, 8]
    assert num_values(1) == NUM_VALUES and num_engines_of(0) == 1


def test_engines_of_one_server_have_regions_by_its_name() -> None:
    assert engine_regions("a.b", 1) == ["a.b"] and engine_regions("a.b", 2) == ["a.b.dp0", "a.b.dp1"]
    assert [*map(server_region, ("a.b", "a.dpx", *engine_regions("a.b", 2)))] == ["a.b", "a.dpx", "a.b", "a.b"]


def serve(count: int, **engine: Any) -> ServeConfig:
    return ServeConfig(engine=EngineConfig(**engine), frontend=FrontendConfig(data_parallel_size=count))


def test_cpu_engines_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [config.cpu_threads for config in replica_configs(serve(3))] == [2, 2, 2]
    assert [config.region for config in replica_configs(serve(2))] == ["blink.dp0", "blink.dp1"]
    assert replica_configs(serve(1)) == [EngineConfig()]
    assert replica_configs(serve(2, cpu_threads=5))[1].cpu_threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert replica_configs(serve(2))[0].cpu_threads == 0


def test_each_engine_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("blink.cli.replicas.count_gpus", lambda: 4)
    assert deal_gpus("auto", 3) == ["0", "1", "2"] and deal_gpus("cpu", 9) == [""] * 9
    with pytest.raises(ConfigError, match=r"--data-parallel-size 5 needs as many GPUs.*here: 4"):
        deal_gpus("cuda", 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,3")
    assert deal_gpus("cuda", 2) == ["GPU-a", "3"]
    with pytest.raises(ConfigError, match="here: 2"):
        deal_gpus("auto", 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert deal_gpus("auto", 3) == [""] * 3  # CPU engines
    with pytest.raises(ConfigError, match="here: 0"):
        deal_gpus("cuda", 2)


def test_engines_are_told_one_secret_of_their_block_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blink.cli.replicas.count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = (engine.environment for engine in start_engines(serve(2)))
    other = start_engines(serve(2))[0].environment
    assert first[HASH_KEY_VARIABLE] == second[HASH_KEY_VARIABLE] != other[HASH_KEY_VARIABLE]
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert start_engines(serve(1))[0].environment == {}


def test_several_engines_go_neither_with_rdma_nor_with_llm() -> None:
    with pytest.raises(ConfigError, match="--rdma-listen"):
        resolve_serve(serve(2, rdma_listen="127.0.0.1:1"))
    with pytest.raises(ConfigError, match="data_parallel_size is for `blink serve`"):
        read_options("", {"data_parallel_size": 2})
    with pytest.raises(ConfigError, match="--data-parallel-size must be between 1 and 64"):
        FrontendConfig(data_parallel_size=0)
