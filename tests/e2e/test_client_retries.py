# SPDX-License-Identifier: Apache-2.0
"""OpenAI's and Anthropic's own clients while a server is full, starts, drains or is away: their retries get through.

Anthropic's is one of the extra "clients".
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from blink.models.weights.files import default_model_path
from ports import free_port
from processes import Engine, Frontend, run_engine, start_frontend, stop, wait_for
from tiny_model import write_tiny_model

anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

_PATIENCE = 300.0  # seconds; an engine boots that long where much else runs
_RETRIES = 600  # once a second, as they are told
_TOKENIZER = f"--tokenizer={default_model_path()}"
_MODEL_LEN = 4096  # tokens that take seconds
_MAX_SEQUENCES = 64
_NUM_SLOTS = 2
_ENDLESS = {"temperature": 0, "ignore_eos": True}
Ask = Callable[..., Any]


def open_openai(url: str, **options: Any) -> Ask:
    """Return what asks by chats of OpenAI's client, and returns the number of tokens."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", **options)

    def ask(max_tokens: int = 4, *, stream: bool = False) -> int:
        messages: Any = [{"role": "user", "content": "Hi"}]
        made: Any = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=max_tokens, stream=stream, extra_body=_ENDLESS
        )
        return len(list(made)) if stream else made.usage.completion_tokens

    return ask


def open_anthropic(url: str, **options: Any) -> Ask:
    """Return the same by messages of Anthropic's client."""
    client = anthropic.Anthropic(base_url=url, api_key="none", **options)

    def ask(max_tokens: int = 4, *, stream: bool = False) -> int:
        messages: Any = [{"role": "user", "content": "Hi"}]
        asked: Any = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "extra_body": _ENDLESS}
        if stream:
            return len(list(client.messages.create(stream=True, **asked)))
        return client.messages.create(**asked).usage.output_tokens

    return ask


each_client = pytest.mark.parametrize("open_client", [open_openai, open_anthropic])
TIMEOUTS = ("APITimeoutError", "ReadTimeout")  # that of a stream is the HTTP library's own


def model_flags(folder: Path) -> list[str]:
    sizes = [f"--max-num-seqs={_NUM_SLOTS}", f"--max-model-len={_MODEL_LEN}", "--num-gpu-blocks-override=1024"]
    return [str(write_tiny_model(folder)), "--load-format=dummy", _TOKENIZER, "--served-model-name=tiny", *sizes]


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that runs two sequences at once."""
    flags = [*model_flags(tmp_path_factory.mktemp("retries")), f"--max-sequences-per-worker={_MAX_SEQUENCES}"]
    with run_engine(*flags) as engine:
        yield engine


@contextmanager
def frontend_of(engine: Engine, *flags: str) -> Iterator[Frontend]:
    frontend = start_frontend(engine.region, _TOKENIZER, *flags)
    try:
        yield frontend
    finally:
        stop(frontend.process)


def wait_until_running(server: Frontend, count: int) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_running") == count, _PATIENCE)


@contextmanager
def occupied(server: Frontend, num_streams: int) -> Iterator[list[httpx.Response]]:
    """Hold a server's places with endless streams."""
    body = {"prompt": "Hi", "max_tokens": _MODEL_LEN - 16, "stream": True, **_ENDLESS}
    opened: list[httpx.Response] = []
    with httpx.Client(base_url=server.url, timeout=_PATIENCE, trust_env=False) as http:
        for place in range(num_streams):
            request = http.build_request("POST", "/v1/completions", json=body)
            opened.append(http.send(request, stream=True).raise_for_status())
            wait_until_running(server, min(place + 1, _NUM_SLOTS))
        yield opened
        for response in opened:
            response.close()


@each_client
@pytest.mark.parametrize(
    ("flag", "num_streams", "reason"),
    [
        (f"--max-client-share={2 / _MAX_SEQUENCES}", 2, "client_limit"),
        ("--max-num-queued-reqs=1", _NUM_SLOTS + 1, "queue_full"),
    ],
)
def test_a_full_server_is_asked_again_until_it_has_room(
    small_engine: Engine, open_client: Any, flag: str, num_streams: int, reason: str
) -> None:
    with frontend_of(small_engine, flag) as server, occupied(server, num_streams) as streams:
        refusals = f'vllm:admission_rejections_total{{engine="0",model_name="tiny",reason="{reason}"}}'
        before = server.metric(refusals)
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
            open_client(server.url, max_retries=0)()
        assert refused.value.status_code == (429 if reason == "client_limit" else 503)
        assert refused.value.response.headers["retry-after"] == "1"
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(open_client(server.url, max_retries=_RETRIES))
            wait_for(lambda: server.metric(refusals) >= before + 3, _PATIENCE)  # the client above, and two tries
            assert not answer.done()
            for stream in streams:
                stream.close()
            assert answer.result(_PATIENCE) == 4


@each_client
@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_timeout_frees_its_place(small_engine: Engine, open_client: Any, stream: bool) -> None:
    with frontend_of(small_engine) as server:
        ask = open_client(server.url, timeout=0.7, max_retries=0)
        aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
        before = server.metric(aborted)
        with occupied(server, _NUM_SLOTS if stream else 0), pytest.raises(Exception) as timeout:
            ask(_MODEL_LEN - 64, stream=stream)  # a stream has no token in time, as it waits for its place
        assert type(timeout.value).__name__ in TIMEOUTS
        wait_for(lambda: server.metric(aborted) > before, _PATIENCE)
        server.wait_until_idle()
        assert ask(4) == 4


@each_client
def test_a_server_that_drains_ends_its_streams_and_is_replaced(small_engine: Engine, open_client: Any) -> None:
    with frontend_of(small_engine, f"--shutdown-timeout={_PATIENCE}") as old:
        ask = open_client(old.url, max_retries=_RETRIES)
        assert ask() == 4
        with ThreadPoolExecutor() as threads:
            running = threads.submit(ask, 600)
            wait_until_running(old, 1)
            old.process.terminate()
            asked = threads.submit(ask)  # of a server that takes no new connection
            assert running.result(_PATIENCE) == 600
            assert old.process.wait(_PATIENCE) == 0
            new = start_frontend(small_engine.region, _TOKENIZER, port=old.port)
            try:
                assert asked.result(_PATIENCE) == 4
            finally:
                stop(new.process)


@contextmanager
def whole_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "blink", "serve", *model_flags(folder), "--device=cpu", "--cpu-threads=1"]
    process = subprocess.Popen([*command, f"--port={port}", f"--region=retries-{port}"])
    try:
        yield process
    finally:
        stop(process)


@each_client
def test_a_server_that_starts_and_starts_again_is_waited_for(open_client: Any, tmp_path: Path) -> None:
    port = free_port()
    ask = open_client(f"http://127.0.0.1:{port}", max_retries=_RETRIES)
    for _ in range(2):
        with whole_server(tmp_path, port) as process:
            assert ask() == 4  # also while the port is closed, and while the engine boots
            assert process.poll() is None


def test_a_frontend_without_an_engine_says_when_to_come_again(tmp_path: Path) -> None:
    region = f"retries-{time.monotonic_ns()}"
    server = start_frontend(region, _TOKENIZER, "--served-model-name=tiny", wait=False)
    try:
        wait_for(lambda: is_open(server), _PATIENCE)
        with pytest.raises(openai.InternalServerError) as refused:
            open_openai(server.url, max_retries=0)()
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")
        answer: list[int] = []
        thread = threading.Thread(target=lambda: answer.append(open_openai(server.url, max_retries=_RETRIES)()))
        thread.start()
        command = [sys.executable, "-m", "blink", "engine", *model_flags(tmp_path), f"--region={region}"]
        engine = subprocess.Popen([*command, "--device=cpu", "--cpu-threads=1"])
        try:
            thread.join(_PATIENCE)
        finally:
            stop(engine)
        assert answer == [4]
    finally:
        stop(server.process)


def is_open(server: Frontend) -> bool:
    """Say whether a frontend listens."""
    assert server.process.poll() is None
    try:
        return server.http.get("/version").status_code == 200
    except httpx.TransportError:
        return False
