# SPDX-License-Identifier: Apache-2.0
"""Pauses of a server over HTTP, as RL trainers use them: streams stand still, end or go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink.offline.tensors import stream_tensors
from model_families import change_weights, save_model
from ports import free_port
from processes import run_engine, start_frontend, stop, wait_for
from weight_trainer import describe_weights, list_weights, start_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
_SIZES = ("--max-num-seqs=4", "--num-gpu-blocks-override=100", "--dtype=float32", "--max-num-batched-tokens=64")
_PACE = "--tpot-target-ms=15"  # requests run for long enough to be met while they do
_PROMPT = [5, 9, 30, 31, 32] * 4


class Server:
    """What asks a server, as a client and as its admin."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False, headers={"x-api-key": "master"})
        self.pool = ThreadPoolExecutor(8)

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body or None).raise_for_status()
        return answer.json() if answer.content else None

    def stream(self, tensors: Iterator[bytes]) -> None:
        """Send a stream of tensors, in chunks."""
        headers = {"Content-Type": "application/octet-stream"}
        self._http.post("/update_weights_from_tensor", content=tensors, headers=headers).raise_for_status()

    def status(self, path: str, **body: Any) -> int:
        return self._http.post(path, json=body or None).status_code

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def complete(self, max_tokens: int, prompt: Sequence[int] = _PROMPT) -> dict[str, Any]:
        body = {
            **{"prompt": [*prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            "return_token_ids": True,
        }
        return self._http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]

    def start(self, max_tokens: int) -> Future[dict[str, Any]]:
        """Begin a request, and return once it runs."""
        started = self.pool.submit(self.complete, max_tokens)
        if not self.get("/is_paused")["is_paused"]:
            wait_for(lambda: self.count_running() > 0 or started.done(), 60)
        return started

    def is_healthy(self) -> bool:
        return self._http.get("/health").status_code == 200

    def count_running(self) -> int:
        text = self._http.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model, and the same with other weights."""
    folder = tmp_path_factory.mktemp("pause")
    save_model("llama-3.1", folder / "first")
    return folder / "first", change_weights(folder / "first", folder / "second")


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Server]:
    folder = folders[0]
    model = (str(folder), "--skip-tokenizer-init", "--served-model-name=base")
    with run_engine(*model, *_SIZES, _PACE) as engine:
        frontend = start_frontend(engine.region, *model, "--admin-api-key=master", "--enable-admin-endpoints")
        yield Server(frontend.url)
        stop(frontend.process)


def test_a_kept_request_goes_on_with_the_same_tokens(server: Server) -> None:
    whole = server.complete(100)["token_ids"]
    started = server.start(100)
    server.post("/pause?mode=keep")
    assert server.get("/is_paused") == {"is_paused": True}
    server.post("/resume")
    assert started.result(60)["token_ids"] == whole
    assert server.get("/is_paused") == {"is_paused": False}


def test_what_comes_meanwhile_waits_and_the_server_stays_healthy(server: Server) -> None:
    server.post("/pause_generation")
    late = server.start(3)
    assert not threading.Event().wait(0.3) and not late.done()
    assert server.is_healthy()
    server.post("/continue_generation")
    assert len(late.result(60)["token_ids"]) == 3


def test_abort_ends_what_runs_with_what_it_has(server: Server) -> None:
    started = server.start(360)
    server.post("/pause?mode=abort")
    choice = started.result(60)
    assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) < 360
    server.post("/resume")


def test_wait_answers_when_what_runs_has_ended(server: Server) -> None:
    started = server.start(60)
    server.post("/pause?mode=wait")
    assert started.result(10)["finish_reason"] == "length"
    late = server.start(2)
    assert not threading.Event().wait(0.3) and not late.done()
    server.post("/resume")
    assert len(late.result(60)["token_ids"]) == 2


def test_a_kept_request_goes_on_with_the_tokens_of_new_weights(server: Server, folders: tuple[Path, Path]) -> None:
    before = server.complete(100)["token_ids"]
    started = server.start(100)
    server.post("/pause_generation", mode="retract")
    server.post("/update_weights_from_disk", model_path=str(folders[1]))
    assert server.get("/is_paused") == {"is_paused": True}
    server.post("/continue_generation")
    tokens = started.result(60)["token_ids"]
    assert len(tokens) == 100 and tokens != before
    common = next(place for place in range(100) if tokens[place] != before[place])
    assert tokens[common:] == server.complete(100 - common, [*_PROMPT, *tokens[:common]])["token_ids"]
    server.post("/update_weights_from_disk", model_path=str(folders[0]))
    assert server.get("/is_paused") == {"is_paused": False}
    assert server.complete(100)["token_ids"] == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_holds_requests_and_wakes_up_as_it_was(server: Server, level: int) -> None:
    before = server.complete(20)["token_ids"]
    server.post(f"/sleep?level={level}")
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    late = server.start(20)
    server.post("/wake_up?tags=weights")
    assert server.status("/resume") == 400
    assert server.get("/is_sleeping") == {"is_sleeping": True} and not late.done()
    server.post("/wake_up?tags=kv_cache")
    assert late.result(60)["token_ids"] == before
    assert server.get("/is_sleeping") == {"is_sleeping": False}


def test_a_stream_of_tensors_gives_a_server_their_weights(server: Server, folders: tuple[Path, Path]) -> None:
    before = server.complete(20)["token_ids"]
    first, second = (list_weights(folder) for folder in folders)
    server.stream(stream_tensors(second))
    assert server.complete(20)["token_ids"] == _tokens_of(server, folders[1])
    server.post("/begin_weight_update")
    pairs = [*first.items()]
    for part in (pairs[:4], pairs[4:]):
        server.stream(stream_tensors(part))
    assert server.get("/is_paused") == {"is_paused": False}
    server.post("/end_weight_update", flush_cache=True)
    assert server.complete(20)["token_ids"] == before


def test_a_trainer_that_goes_while_it_sends_leaves_the_weights_whole(
    server: Server, folders: tuple[Path, Path]
) -> None:
    before = server.complete(20)["token_ids"]
    server.post("/pause_generation", mode="retract")

    def broken() -> Iterator[bytes]:
        whole = b"".join(stream_tensors(list_weights(folders[1])))
        yield whole[: len(whole) // 2]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        server.stream(broken())
    server.post("/continue_generation")
    assert server.complete(20)["token_ids"] == before


def test_vllms_calls_take_what_a_trainer_broadcasts(server: Server, folders: tuple[Path, Path]) -> None:
    before, port, told = server.complete(20)["token_ids"], free_port(), describe_weights(folders[1])
    trainer = start_trainer(folders[1], port)
    try:
        server.get("/get_world_size")
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        server.post("/init_weight_transfer_engine", init_info=place)
        server.post("/start_weight_update")
        info = {"names": told["names"], "dtype_names": told["dtypes"], "shapes": told["shapes"]}
        server.post("/update_weights", update_info=info)
        assert server.complete(20)["token_ids"] == before
        server.post("/finish_weight_update")
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
    assert server.complete(20)["token_ids"] == _tokens_of(server, folders[1])
    server.post("/update_weights_from_disk", model_path=str(folders[0]))
    assert server.complete(20)["token_ids"] == before


def _tokens_of(server: Server, folder: Path) -> list[int]:
    """Return the tokens of a model's weights as they are read from disk."""
    server.post("/update_weights_from_disk", model_path=str(folder))
    return server.complete(20)["token_ids"]


def test_an_update_that_does_not_fit_changes_nothing(server: Server, folders: tuple[Path, Path]) -> None:
    before = server.complete(5)["token_ids"]
    assert server.status("/update_weights_from_disk", model_path=str(folders[0] / "nowhere")) == 400
    assert server.complete(5)["token_ids"] == before
