# SPDX-License-Identifier: Apache-2.0
"""A frontend's connection to real schedulers on threads, which come, fail and go. The model counts upwards."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.errors import EngineUnavailableError
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import BATCH_HEADER, CqeKind, FinishReason
from blink.region.memory import create_region, publish_region, region_path
from blink.region.native import lib
from blink.sampling_params import SamplingParams

VOCAB = 97
PATIENCE = 120.0  # seconds; reached only by failures


class Engine:
    """A scheduler thread and a model thread whose next token is the last one plus one."""

    def __init__(self, name: str, lease_timeout: float = 5.0, num_queue_pairs: int = 2) -> None:
        config = EngineConfig(
            max_num_seqs=4,
            max_num_batched_tokens=32,
            block_size=8,
            num_queue_pairs=num_queue_pairs,
            max_sequences_per_worker=8,
            lease_timeout=lease_timeout,
        )
        geometry = build_geometry(config, max_model_len=64, vocab_size=VOCAB, num_blocks=32)
        self.region = create_region(name, geometry, "counting")
        self.state = HostState(self.region)
        self.fail = self.pause = False
        self._over = False
        self._loop = lib.blink_loop_start(self.state.address)
        self._model = threading.Thread(target=self._run)
        self._model.start()
        publish_region(self.region, name)

    def _run(self) -> None:
        while (kind := lib.blink_loop_wait(self._loop, 20)) != -2 and not self._over:
            if kind < 0:
                continue
            while self.pause and not self._over:
                time.sleep(0.001)
            rows = int(self.state.array("whole.header", BATCH_HEADER)[0]["num_rows"])
            ends = self.state.array("whole.query_starts", "i4")[1 : rows + 1] - 1
            ids, sampled = (self.state.array(f"whole.{name}", "i4") for name in ("input_ids", "sampled_tokens"))
            sampled[:rows] = (ids[ends] + 1) % VOCAB
            lib.blink_loop_finish(self._loop, self.fail)

    def kill(self) -> None:
        """End both threads without a word to anybody, as a crash would."""
        if not self._over:
            self._over = True
            self._model.join()
            lib.blink_loop_stop(self._loop)
            self.region.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"client-{os.getpid()}-{abs(hash(request.node.name)) % 10**8}"
    yield name
    region_path(name).unlink(missing_ok=True)


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_engine(**options: float) -> Engine:
        engines.append(Engine(name, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.kill()


@pytest.fixture
def client(name: str) -> Iterator[EngineClient]:
    client = EngineClient(ShmConnector(name), engine_timeout=2.0)
    yield client
    client.close()


def tick_until(client: EngineClient, holds: Callable[[], object]) -> list[str]:
    """Tick until something holds; returns the reported losses."""
    losses: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, client.unavailable_reason
        if lost := client.tick():
            losses.append(lost)
        time.sleep(0.01)
    return losses


def connect(client: EngineClient) -> None:
    tick_until(client, lambda: client.ready)


def submit(client: EngineClient, max_tokens: int = 5, last: int = 10) -> int:
    return client.submit(np.asarray([1, 2, last], np.int32), SamplingParams(max_tokens=max_tokens), seed=0)


def answer(client: EngineClient, sequence: int) -> tuple[list[int], FinishReason]:
    """Wait on the client's descriptor, as an event loop does, until the sequence has ended."""
    tokens, deadline = list[int](), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert client.tick() is None
        select.select([client], [], [], 0.25)
        for completion in client.drain():
            assert completion["sequence"] == sequence
            if completion["kind"] == CqeKind.TOKEN:
                tokens.append(int(completion["token"]))
            if completion["finish_reason"]:
                return tokens, FinishReason(int(completion["finish_reason"]))
    raise AssertionError("no end")


def test_tokens_arrive_and_wake_the_event_loop(client: EngineClient, start: Callable[..., Engine]) -> None:
    start()
    connect(client)
    assert answer(client, submit(client)) == ([11, 12, 13, 14, 15], FinishReason.LENGTH)
    assert client.stats()["generation_tokens"] == 5


def test_the_engine_describes_itself(client: EngineClient, start: Callable[..., Engine]) -> None:
    engine = start()
    connect(client)
    info = client.info
    assert info is not None
    assert (info.max_model_len, info.vocab_size, info.block_size, info.model) == (64, VOCAB, 8, "counting")
    assert info.hash_key == engine.region.header["hash_key"].tobytes() and info.max_sequences == 8


def test_there_is_no_service_before_an_engine_and_it_is_found_when_it_comes(
    client: EngineClient, start: Callable[..., Engine]
) -> None:
    assert client.tick() is None and not client.ready and client.stats() == {}
    with pytest.raises(EngineUnavailableError, match="not running"):
        submit(client)
    assert client.tick_seconds < 0.1, "an engine that has booted serves at once"
    start()
    connect(client)
    assert client.tick_seconds == 0.25
    assert answer(client, submit(client, 1)) == ([11], FinishReason.LENGTH)


def test_end_of_sequence_tokens_stop_unless_ignored(client: EngineClient, start: Callable[..., Engine]) -> None:
    start()
    connect(client)
    prompt = np.asarray([1, 10], np.int32)
    params = SamplingParams(max_tokens=6, stop_token_ids=[15])
    stopped = client.submit(prompt, params, seed=0, eos_token_ids=(13, 50))
    assert answer(client, stopped) == ([11, 12, 13], FinishReason.STOP)
    params = SamplingParams(max_tokens=6, stop_token_ids=[15], ignore_eos=True)
    ignoring = client.submit(prompt, params, seed=0, eos_token_ids=(13, 50))
    assert answer(client, ignoring) == ([11, 12, 13, 14, 15], FinishReason.STOP)


def test_a_cancelled_sequence_ends_by_abort(client: EngineClient, start: Callable[..., Engine]) -> None:
    engine = start()
    connect(client)
    engine.pause = True
    sequence = submit(client, 50)
    client.cancel(sequence)
    time.sleep(0.1)
    engine.pause = False
    tokens, finish = answer(client, sequence)
    assert finish == FinishReason.ABORT and len(tokens) < 50


def test_a_restarted_engine_is_noticed_and_served_again(client: EngineClient, start: Callable[..., Engine]) -> None:
    start().kill()
    first = start()
    connect(client)
    submit(client, 50)
    first.kill()
    start()
    losses = tick_until(client, lambda: client.ready and client.stats()["num_steps"] == 0)
    assert losses == ["the engine was restarted"]
    assert answer(client, submit(client)) == ([11, 12, 13, 14, 15], FinishReason.LENGTH)


def test_a_failed_engine_is_reported_with_its_error(client: EngineClient, start: Callable[..., Engine]) -> None:
    engine = start()
    connect(client)
    engine.fail = True
    submit(client)
    assert tick_until(client, lambda: not client.ready) == ["the engine failed: STEP_FAILED"]
    with pytest.raises(EngineUnavailableError, match="STEP_FAILED"):
        submit(client)


def test_an_engine_without_heartbeat_is_given_up_after_the_timeout(
    client: EngineClient, start: Callable[..., Engine]
) -> None:
    engine = start()
    connect(client)
    engine.kill()
    began = time.monotonic()
    assert tick_until(client, lambda: not client.ready) == ["the engine has given no sign of life for 2 s"]
    assert time.monotonic() - began > 1.5


def test_a_pause_of_the_whole_machine_does_not_make_the_engine_seem_dead(
    client: EngineClient, start: Callable[..., Engine]
) -> None:
    """After a pause a frontend may run before the engine's first heartbeat: the pause does not age the heartbeat."""
    engine = start()
    connect(client)
    engine.kill()
    client.tick()
    time.sleep(2.5)  # longer than the timeout, without a look
    assert client.tick() is None
    assert tick_until(client, lambda: not client.ready) == ["the engine has given no sign of life for 2 s"]


def test_a_stopped_and_a_draining_engine_take_nothing_more(client: EngineClient, start: Callable[..., Engine]) -> None:
    engine = start()
    connect(client)
    engine.region.store_control("drain", 1)
    tick_until(client, lambda: engine.region.control_word("state") > 1)
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        submit(client)
    engine.region.store_control("stop", 1)
    assert tick_until(client, lambda: not client.ready) == ["the engine was stopped"]


def test_a_silent_frontend_loses_its_sequences_and_can_come_back(
    client: EngineClient, start: Callable[..., Engine]
) -> None:
    start(lease_timeout=1.0)
    connect(client)
    submit(client, 50)
    time.sleep(2.5)
    lost = client.tick()
    assert lost == "this frontend was silent, or left its completions unread, for too long and lost its lease"
    connect(client)
    client.tick()
    assert answer(client, submit(client, 2)) == ([11, 12], FinishReason.LENGTH)


def test_more_clients_than_queue_pairs_wait_for_one_to_go(
    client: EngineClient, name: str, start: Callable[..., Engine]
) -> None:
    start(num_queue_pairs=1)
    first = EngineClient(ShmConnector(name), engine_timeout=2.0)
    connect(first)
    client.tick()
    assert not client.ready and "--num-queue-pairs" in client.unavailable_reason
    first.close()
    connect(client)
    assert answer(client, submit(client, 2)) == ([11, 12], FinishReason.LENGTH)


@pytest.mark.parametrize(("grace", "is_kept"), [(30.0, True), (0.7, False)])
def test_the_lease_outlives_a_busy_interpreter_but_not_one_that_hangs(
    name: str, start: Callable[..., Engine], grace: float, is_kept: bool
) -> None:
    engine = start(lease_timeout=0.5)
    client = EngineClient(ShmConnector(name), engine_timeout=60.0, lease_grace=grace)
    connect(client)
    sequence = submit(client)
    client.tick()
    time.sleep(1.8)  # as the event loop does while one request keeps it
    lost = client.tick()
    assert (lost is None) is is_kept
    if is_kept:
        assert answer(client, sequence) == ([11, 12, 13, 14, 15], FinishReason.LENGTH)
    client.close()
    engine.kill()
