# SPDX-License-Identifier: Apache-2.0
"""Blink on Ray Serve: a real local cluster, real engines, and requests through Serve's proxy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink.errors import ConfigError, EngineUnavailableError
from blink.models.weights.files import default_model_path
from blink.view.samples import Samples, ServerSource
from ports import free_port
from processes import wait_for
from tiny_model import write_tiny_model

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded"),
]
_STREAMS = 8
_FLAGS = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20, "cpu_threads": 1}
Cluster = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def deploy() -> Iterator[Cluster]:
    """Deploys an application on a local cluster, in place of the one before, and returns its client."""
    from ray import serve

    from blink.ray import app

    port = free_port()
    ray.init(num_cpus=16, object_store_memory=100 << 20, include_dashboard=False, configure_logging=False)
    serve.start(http_options={"port": port})
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as http:

        def run(**arguments: Any) -> httpx.Client:
            serve.run(app(arguments))
            wait_for(lambda: http.get("/health").status_code == 200, 60)
            return http

        yield run
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments for a model whose tokens mean nothing and come within some milliseconds: streams last for seconds."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=16)
    flags = {**_FLAGS, "load_format": "dummy", "tokenizer": str(default_model_path())}
    return {"model": str(folder), "name": "tiny", "flags": flags}


def body_of(prompt: list[int], count: int, **more: object) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**asked, **more}


def read_stream(http: httpx.Client, body: dict[str, Any], tokens: list[int]) -> dict[str, Any] | None:
    """Stream a completion into a list as it comes; return the error it ended with. It always says that it is over."""
    error = None
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
        last = lines.pop()
        for line in lines:
            chunk = json.loads(line.removeprefix("data: "))
            error = chunk.get("error") or error
            tokens += chunk["choices"][0].get("token_ids") or [] if "choices" in chunk else []
    assert last == "data: [DONE]"
    return error


def samples(http: httpx.Client) -> Samples:
    """Scrape; the proxy of a busy machine may take longer than a scrape's patience."""
    for _ in range(5):
        with contextlib.suppress(EngineUnavailableError):
            return ServerSource(str(http.base_url)).read()
    raise AssertionError("no answer to five scrapes")


def is_whole(http: httpx.Client, replicas: int) -> bool:
    """Whether so many replicas have an engine that is ready."""
    return list(samples(http).by_label("blink:engine_up", "engine").values()) == [1.0] * replicas


def engines() -> list[int]:
    """The process ids of all engines of this cluster."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and b"\0blink\0engine\0" in _read(process / "cmdline"):
            supervisor = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if b"\0blink.ray.child\0" in _read(Path("/proc") / supervisor / "cmdline"):
                found.append(int(process.name))
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_errors_and_models_are_those_of_a_single_server(deploy: Cluster, tiny: dict[str, Any]) -> None:
    other = {**tiny, "name": "other"}
    http = deploy(models=[tiny, other])
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
    assert http.get("/v1/models/other").json()["id"] == "other"
    for name in ("tiny", "other"):
        assert http.post("/v1/completions", json=body_of([1, 2], 3, model=name)).json()["model"] == name
    unknown = http.post("/v1/completions", json=body_of([1, 2], 3, model="third"))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    unnamed = http.post("/v1/completions", json=body_of([1, 2], 3))
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    wrong = http.post("/v1/completions", json=body_of([1, 2], -3, model="tiny"))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert http.post("/v1/completions", content=b"x" * (33 << 20)).status_code == 413
    assert set(samples(http).by_label("blink:engine_up", "model_name")) == {"tiny", "other"}


def test_a_client_that_hangs_up_ends_its_sequences(deploy: Cluster, tiny: dict[str, Any]) -> None:
    http = deploy(**tiny)
    body = body_of([1, 2, 3], 2000, stream=True, n=_STREAMS, temperature=1)
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # is kept, as its end closes the connection
        next(lines)
        wait_for(lambda: samples(http).value("vllm:num_requests_running") == _STREAMS, 60)
    wait_for(lambda: samples(http).value("vllm:num_requests_running") == 0, 60)
    assert samples(http).value("vllm:request_success_total", finished_reason="abort") == _STREAMS


def test_a_killed_engine_breaks_its_own_streams_alone_and_comes_back(deploy: Cluster, tiny: dict[str, Any]) -> None:
    http = deploy(**tiny, num_replicas=2)
    bodies = [body_of([100 + i, 7, 8], 1500) for i in range(_STREAMS)]
    expected = [http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] for body in bodies]
    streams: list[list[int]] = [[] for _ in bodies]
    errors: dict[int, Any] = {}

    def keep(i: int) -> None:
        errors[i] = read_stream(http, bodies[i], streams[i])

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(_STREAMS)]
    for thread in threads:
        thread.start()
    busy: dict[str, float] = {}

    def are_all_running() -> bool:
        busy.update(samples(http).by_label("vllm:num_requests_running", "engine"))
        return sum(busy.values()) == _STREAMS

    wait_for(are_all_running, 60)
    assert min(busy.values()) > 0
    before = engines()
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: any(errors.values()), 60)  # what it got before its frontend noticed is lost too
    for prompt in range(20):  # others go to the replica that is left
        answer = http.post("/v1/completions", json=body_of([prompt + 1, 2, 3], 3))
        assert answer.status_code == 200, answer.text
    for thread in threads:
        thread.join()
    broken = [i for i, error in errors.items() if error is not None]
    assert len(errors) == _STREAMS and float(len(broken)) in busy.values()
    for i in range(_STREAMS):
        assert streams[i] == expected[i][: len(streams[i])]
        assert (len(streams[i]) < 1500) == (i in broken)
        if i in broken:
            assert (errors[i]["code"], errors[i]["type"]) == (503, "ServiceUnavailableError")
    wait_for(lambda: is_whole(http, 2), 120)
    assert len(engines()) == 2 and len(set(before) & set(engines())) == 1


def test_a_replica_that_gives_up_is_replaced(deploy: Cluster, tiny: dict[str, Any]) -> None:
    http = deploy(**tiny, num_replicas=2)
    before = set(samples(http).by_label("blink:engine_up", "engine"))
    [engine, _] = engines()
    supervisor = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: engine not in engines(), 60)  # it ends with its supervisor
    assert http.post("/v1/completions", json=body_of([1, 2], 3)).status_code == 200
    wait_for(lambda: is_whole(http, 2), 300)
    assert len(before & set(samples(http).by_label("blink:engine_up", "engine"))) == 1


def test_scaling_up_and_down_under_load_loses_no_request(deploy: Cluster, tiny: dict[str, Any]) -> None:
    """One engine that runs two sequences at once; six streams make four wait, one does not."""
    delays = {"metrics_interval_s": 0.5, "look_back_period_s": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
    flags = {**tiny["flags"], "max_num_seqs": 2}
    http = deploy(**{**tiny, "flags": flags}, autoscaling={"min_replicas": 1, "max_replicas": 2, **delays})
    is_over, width = threading.Event(), 6
    counts: list[int] = []

    def keep(i: int) -> None:
        while not is_over.is_set():
            if i >= width:
                time.sleep(0.1)
                continue
            tokens: list[int] = []
            assert read_stream(http, body_of([i + 5, 6, 7], 300), tokens) is None
            counts.append(len(tokens))

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(width)]
    for thread in threads:
        thread.start()
    try:
        assert is_whole(http, 1)
        wait_for(lambda: is_whole(http, 2), 300)
        seen = len(counts)
        wait_for(lambda: len(counts) > seen + 20, 120)
        width = 1
        wait_for(lambda: is_whole(http, 1), 300)
        seen = len(counts)
        wait_for(lambda: len(counts) > seen + 5, 120)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert set(counts) == {300} and all(not thread.is_alive() for thread in threads)
    wait_for(lambda: len(engines()) == 1, 60)


def converse(http: httpx.Client, model: str, conversations: int) -> float:
    """Hold conversations of ten turns side by side; return the share of their prompt tokens that was cached.

    One request at a time: replicas that have nothing to do are chosen at random where nothing else decides.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in range(conversations)]
    num_cached = num_tokens = 0
    for turn in range(10):
        for number, messages in enumerate(histories):
            messages.append({"role": "user", "content": f"Tell me fact {turn} about the number {number}."})
            body = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0.7, "seed": number}
            reply = http.post("/v1/chat/completions", json=body).json()
            messages.append(reply["choices"][0]["message"])
            num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            num_tokens += reply["usage"]["prompt_tokens"]
    return num_cached / num_tokens


def test_conversations_find_their_prefixes_and_at_random_they_do_not(deploy: Cluster) -> None:
    model = {"flags": _FLAGS, "num_replicas": 2}
    http = deploy(models=[{**model, "name": "by-prefix"}, {**model, "name": "at-random", "prefix_routing": False}])
    reused = {name: converse(http, name, 3) for name in ("by-prefix", "at-random")}
    prompts = samples(http).by_label("vllm:prompt_tokens_total", "engine")
    print(f"reused {reused}, prompt tokens by replica {prompts}")
    assert reused["by-prefix"] >= 0.8 > reused["at-random"]
    assert len(prompts) == 4 and min(prompts.values()) > 0.2 * max(prompts.values())


def test_arguments_that_make_no_sense_are_refused_before_anything_starts() -> None:
    from blink.ray import app

    for arguments, text in (
        ({"flags": {"max_num_seq": 3}}, "unrecognized flag --max-num-seq; did you mean --max-num-seqs?"),
        ({"flags": {"port": 3}}, "cannot hold port"),
        ({"flags": {"max_num_seqs": 0}}, "--max-num-seqs must be at least 1"),
        ({"replicas": 2}, "replicas"),
        ({"models": [{}, {}]}, "two models are called SmolLM2-135M-Instruct"),
        ({"models": [{}], "num_gpus": 1}, "num_gpus in each of"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            app(arguments)


def test_neither_ingress_nor_replica_loads_torch() -> None:
    modules = "blink.ray.application, blink.ray.child, sys"
    run = subprocess.run(
        [sys.executable, "-c", f"import {modules}; print('torch' in sys.modules)"], capture_output=True
    )
    assert run.stdout == b"False\n", run.stderr.decode()


def test_pyright_has_no_complaint_about_what_needs_ray() -> None:
    root = Path(__file__).resolve().parents[2]
    files = [str(root / "src" / "blink" / "ray"), str(root / "tests" / "e2e" / "test_ray_serve.py")]
    run = subprocess.run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *files], capture_output=True)
    assert run.returncode == 0, run.stdout.decode()
