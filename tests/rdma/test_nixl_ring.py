# SPDX-License-Identifier: Apache-2.0
"""The queue pair over NIXL, against a real scheduler in another process of this host: memory copies by the kernel.

Neither an RDMA device nor the virtual machine takes part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from blink.errors import BlinkError, ConfigError
from blink.link.client import EngineClient
from blink.link.rdma.connector import RdmaConnector
from blink.rdma_config import RdmaConfig
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams
from counting_engine import answer
from rdma_processes import TOKEN, CountingProcess, HttpFrontend, attach, open_link, wait_for
from ring import Inspector, tail_first

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (the extra nixl)")

_REQUESTS = 1000
_HERE = RdmaConfig(rdma_backend="nixl", nixl_transports="cma,tcp")  # tcp: to connect, not to transfer


@pytest.fixture(scope="module")
def nixl_engine() -> Iterator[CountingProcess]:
    engine = CountingProcess("nixl", rdma_backend="nixl", nixl_transports="cma,tcp")
    yield engine
    engine.kill()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_RDMA_TOKEN", TOKEN)


def refusal(place: str, config: RdmaConfig) -> BlinkError:
    """Return what connecting says once the engine answers."""
    connector = RdmaConnector(place, config)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert connector.open() is None
        except BlinkError as error:
            if "cannot be reached" not in error.message:
                return error
        time.sleep(0.05)
    raise AssertionError("no refusal")


def switches(engine: CountingProcess) -> dict[str, str]:
    """Return how often each thread of the engine has slept so far."""
    threads = Path(f"/proc/{engine.process.pid}/task").iterdir()
    return {thread.name: (thread / "status").read_text().partition("\nvoluntary_ctxt")[2] for thread in threads}


def complete(client: EngineClient) -> list[int]:
    """Return the answer to a short prompt."""
    sequence = client.submit(np.arange(5, dtype=np.int32), SamplingParams(max_tokens=3, ignore_eos=True), seed=0)
    got: list[int] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for completion in client.drain():
            assert int(completion["sequence"]) == sequence
            if completion["kind"] == CqeKind.TOKEN:
                got.append(int(completion["token"]))
            if completion["finish_reason"]:
                return got
        time.sleep(0.001)
    raise AssertionError("no answer")


def test_a_thousand_requests_and_none_is_torn_lost_or_repeated(nixl_engine: CountingProcess) -> None:
    link = open_link(nixl_engine.place, _HERE)
    inspector = Inspector(attach(link), link)
    inspector.run(_REQUESTS)
    link.close()
    assert inspector.answered == _REQUESTS and not inspector.faults, inspector.faults


def test_a_tail_before_its_prompt_is_found_out(nixl_engine: CountingProcess) -> None:
    link = open_link(nixl_engine.place, _HERE)
    inspector = Inspector(attach(tail_first(link)), link)
    inspector.run(_REQUESTS // 10)
    link.close()
    assert inspector.faults["wrong"] > 0


def test_a_transport_that_is_not_allowed_is_refused(nixl_engine: CountingProcess) -> None:
    error = refusal(nixl_engine.place, RdmaConfig(rdma_backend="nixl", nixl_transports="tcp"))
    print(error.message)
    assert isinstance(error, ConfigError) and "transport" in error.message


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has an RDMA device")
def test_a_machine_without_rdma_is_refused_by_default() -> None:
    with pytest.raises(ConfigError, match=r"cannot use --nixl-transports rc: .*rc"):
        RdmaConnector("127.0.0.1:1", RdmaConfig(rdma_backend="nixl"))


def test_after_a_restart_of_the_engine_requests_are_answered_again(nixl_engine: CountingProcess) -> None:
    client = EngineClient(RdmaConnector(nixl_engine.place, _HERE), engine_timeout=3)
    wait_for(lambda: client.tick() or client.ready, "the connection")
    assert complete(client) == answer([0, 1, 2, 3, 4], 3)
    nixl_engine.kill()
    wait_for(client.tick, "the loss")
    nixl_engine.start()
    wait_for(lambda: client.tick() or client.ready, "the new connection")
    assert complete(client) == answer([0, 1, 2, 3, 4], 3)
    client.close()


def test_in_steady_state_only_scheduler_and_model_run_in_the_engine(nixl_engine: CountingProcess) -> None:
    link = open_link(nixl_engine.place, _HERE)
    inspector = Inspector(attach(link), link)
    inspector.run(10)
    time.sleep(0.2)
    before = switches(nixl_engine)
    inspector.run(_REQUESTS // 2)
    after = switches(nixl_engine)
    link.close()
    ran = [thread for thread in after if after[thread] != before.get(thread)]
    assert len(after) > len(ran) <= 2


@pytest.mark.slow
def test_a_connection_outlives_the_interval_of_ucx_for_keepalive_messages(nixl_engine: CountingProcess) -> None:
    link = open_link(nixl_engine.place, _HERE)
    pair = attach(link)
    end = time.monotonic() + 25  # 20 by default
    while time.monotonic() < end:
        pair.renew_lease()
        assert link.loss() is None
        time.sleep(0.25)
    Inspector(pair, link).run(10)
    assert pair.is_attached()
    link.close()


def test_a_frontend_that_was_killed_and_started_again_serves() -> None:
    engine = CountingProcess(
        "nixl-single", rdma_backend="nixl", nixl_transports="cma,tcp", num_queue_pairs=1, lease_timeout=0.5
    )
    flags = ["--rdma-backend=nixl", "--nixl-transports=cma,tcp", "--skip-tokenizer-init", "--region=counting"]
    frontend = HttpFrontend(f"--rdma={engine.place}", *flags)
    try:
        frontend.wait()
        assert frontend.complete([1, 2, 3]) == answer([1, 2, 3], 4)
        frontend.kill()
        frontend.start()
        frontend.wait()
        assert frontend.complete([4, 5]) == answer([4, 5], 4)
    finally:
        frontend.kill()
        engine.kill()
