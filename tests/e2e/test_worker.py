# SPDX-License-Identifier: Apache-2.0
"""The life of a frontend worker: start, keys, TLS, sockets, overload, loss of the engine, shutdown."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError

from ports import free_port
from processes import Engine, Frontend, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
BODY: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
PATIENCE = 300.0  # seconds; reached only by failures
Start = Callable[..., Frontend]
_OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    " -addext subjectAltName=IP:127.0.0.1"
)


@pytest.fixture
def start(region: str) -> Iterator[Start]:
    started: list[Frontend] = []

    def run(*flags: str, **options: Any) -> Frontend:
        started.append(start_frontend(options.pop("region", region), *flags, **options))
        return started[-1]

    yield run
    for frontend in started:
        stop(frontend.process)


class Stream(threading.Thread):
    """Read a stream in the background."""

    def __init__(self, frontend: Frontend, **body: Any) -> None:
        super().__init__()
        self._frontend = frontend
        self._body = body
        self.text = ""
        self.events: list[Any] = []
        self.start()
        wait_for(lambda: bool(self.events), PATIENCE)

    def run(self) -> None:
        with self._frontend.http.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))

    def last(self) -> Any:
        """The last event before [DONE]."""
        self.join(2 * PATIENCE)
        assert self.events[-1] == "[DONE]"
        return json.loads(self.events[-2])


def test_a_worker_starts_before_its_engine_and_says_so(start: Start) -> None:
    frontend = start(region="nobody-serves-this", wait=False)
    wait_for(lambda: _status(frontend) == 503, PATIENCE)
    response = frontend.post("/v1/completions", **BODY)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert frontend.http.get("/metrics").status_code == 200


def _status(frontend: Frontend) -> int:
    try:
        return frontend.http.get("/health").status_code
    except httpx.TransportError:
        return 0


def test_keys_from_flags_and_the_environment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_API_KEY", "from-env")
    frontend = start("--api-key=from-flag")
    for key in ("from-env", "from-flag"):
        assert len(frontend.client.with_options(api_key=key).models.list().data) == 1
    with pytest.raises(AuthenticationError):
        frontend.client.with_options(api_key="wrong").models.list()


def test_request_ids_name_the_response(start: Start) -> None:
    frontend = start("--enable-request-id-headers", "--served-model-name=other")
    response = frontend.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": 'a"b'})
    assert (response.json()["id"], response.headers["x-request-id"]) == ('cmpl-a"b', 'a"b')
    made = frontend.post("/v1/completions", **BODY)
    assert made.json()["id"] == "cmpl-" + made.headers["x-request-id"]
    assert made.json()["model"] == "other"
    assert frontend.post("/v1/completions", **BODY, request_id="mine").json()["model"] == "other"


def test_tls_streams_the_same(start: Start, server: Frontend, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [*_OPENSSL.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    trusted = ssl.create_default_context(cafile=str(certificate))
    frontend = start(f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", verify=trusted)
    events = Stream(frontend, **BODY, stream=True)
    events.join(PATIENCE)
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events.events[:-1])
    assert text == server.complete(**BODY)["choices"][0]["text"]
    frontend.process.send_signal(signal.SIGTERM)  # with an idle connection whose client never says goodbye
    assert frontend.process.wait(25) == 0  # asyncio would wait for 30 seconds


def test_a_unix_socket_serves_and_a_stale_one_is_replaced(start: Start, server: Frontend, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=PATIENCE) as client:

        def is_up() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        for _ in range(2):
            frontend = start(f"--uds={path}", wait=False)
            wait_for(is_up, PATIENCE)
            assert client.post("/v1/completions", json=BODY).json()["choices"] == server.complete(**BODY)["choices"]
            frontend.process.kill()
            frontend.process.wait()


def test_a_full_queue_is_503_and_leaves_nothing_behind(start: Start) -> None:
    frontend = start("--max-num-queued-reqs=2")
    rejections = 'vllm:admission_rejections_total{engine="0",model_name="SmolLM2-135M-Instruct",reason="queue_full"'
    before = frontend.metric(rejections)
    assert frontend.post("/v1/completions", **BODY, n=2).status_code == 200
    response = frontend.post("/v1/completions", **BODY, n=3)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert frontend.metric(rejections) == before + 1
    frontend.wait_until_idle()


def test_more_sequences_than_the_engine_holds_are_503_and_leave_nothing_behind(server: Frontend) -> None:
    stream = Stream(server, **{**ENDLESS, "max_tokens": 12, "n": 60})
    response = server.post("/v1/completions", **{**BODY, "n": 60})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert server.http.get("/load").json() == {"server_load": 60}
    assert stream.last()["choices"][0]["finish_reason"] == "length"
    server.wait_until_idle()


def test_workers_of_one_port_share_requests_and_metrics(start: Start) -> None:
    port = free_port()
    first, second = start(port=port), start(port=port)
    wait_for(lambda: _listens(second), PATIENCE)  # until now, the first may have answered for it
    series = 'vllm:request_success_total{engine="0",finished_reason="length"'
    before = first.metric(series)
    for _ in range(12):  # each on its own connection: the kernel spreads them
        assert (
            httpx.post(
                f"{first.url}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=PATIENCE, trust_env=False
            ).status_code
            == 200
        )
    values = set()
    for _ in range(8):
        text = httpx.get(f"{first.url}/metrics", trust_env=False).text
        values.add(next(line for line in text.splitlines() if line.startswith(series)).rpartition(" ")[2])
    assert values == {str(before + 12)}
    stop(first.process)
    assert second.complete(**BODY)["choices"]


def _listens(frontend: Frontend) -> bool:
    """Whether this very process, and not another one of its port, listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    for file in Path(f"/proc/{frontend.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if str(file.readlink()) in listening:
                return True
    return False


def test_a_killed_worker_frees_its_sequences_and_disturbs_no_other(start: Start, server: Frontend) -> None:
    expected = server.complete(**{**BODY, "max_tokens": 24})["choices"][0]["text"]
    victim = start()
    streams = [threading.Thread(target=_stream_until_cut, args=(victim, ENDLESS)) for _ in range(4)]
    for stream in streams:
        stream.start()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 4, PATIENCE)
    victim.process.kill()
    assert server.complete(**{**BODY, "max_tokens": 24})["choices"][0]["text"] == expected
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, PATIENCE)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert start().complete(**{**BODY, "max_tokens": 24})["choices"][0]["text"] == expected
    for stream in streams:
        stream.join()


def _stream_until_cut(frontend: Frontend, body: dict[str, Any]) -> None:
    with (
        contextlib.suppress(httpx.TransportError),
        frontend.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        for _ in response.iter_lines():
            pass


def test_losing_the_engine_ends_requests_with_an_error_and_heals(
    start: Start, engine: Engine, server: Frontend
) -> None:
    frontend = start("--engine-timeout=2")
    stream = Stream(frontend, **ENDLESS)
    engine.process.send_signal(signal.SIGSTOP)
    try:
        error = stream.last()["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert "no sign of life" in error["message"]
        assert _status(frontend) == 503
    finally:
        engine.process.send_signal(signal.SIGCONT)
    for each in (frontend, server):
        wait_for(lambda each=each: _status(each) == 200, PATIENCE)
    assert frontend.complete(**BODY)["choices"]
    frontend.wait_until_idle()


def test_sigterm_lets_open_requests_finish(start: Start) -> None:
    frontend = start("--shutdown-timeout=200")
    stream = Stream(frontend, **{**ENDLESS, "max_tokens": 20})
    frontend.process.send_signal(signal.SIGTERM)
    wait_for(lambda: _refuses(frontend), PATIENCE)
    last = stream.last()
    assert "choices" in last, last
    assert last["choices"][0]["finish_reason"] == "length"
    assert frontend.process.wait(PATIENCE) == 0


def _refuses(frontend: Frontend) -> bool:
    try:
        return httpx.get(f"{frontend.url}/health", trust_env=False).status_code == 503
    except httpx.TransportError:
        return True


def test_after_the_shutdown_timeout_requests_end_with_an_error(start: Start) -> None:
    frontend = start("--shutdown-timeout=0.5")
    stream = Stream(frontend, **ENDLESS)
    frontend.process.send_signal(signal.SIGINT)
    assert stream.last()["error"]["message"] == "The server is shutting down."
    assert frontend.process.wait(PATIENCE) == 0


def test_a_second_signal_ends_at_once(start: Start) -> None:
    frontend = start()
    stream = Stream(frontend, **ENDLESS)
    frontend.process.send_signal(signal.SIGTERM)
    wait_for(lambda: _refuses(frontend), PATIENCE)
    assert frontend.process.poll() is None
    frontend.process.send_signal(signal.SIGTERM)
    frontend.process.wait(PATIENCE)
    stream.join(PATIENCE)
    assert not stream.is_alive()
    assert '"finish_reason":"length"' not in "".join(stream.events)  # it was cut, not waited for


@pytest.mark.parametrize(
    "flags", [["--chat-template=/nothing"], ["--ssl-certfile=/nothing"], ["--host=192.0.2.1"], ["--tokenizer=/nothing"]]
)
def test_wrong_configuration_exits_with_2_and_one_line(flags: list[str]) -> None:
    command = [sys.executable, "-m", "blink", "frontend", "--region=x", f"--port={free_port()}", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("blink: error: ")
    assert result.stderr.count("\n") == 1


def test_without_a_tokenizer_prompts_are_token_ids_and_answers_have_no_text(start: Start) -> None:
    frontend = start("--skip-tokenizer-init")
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    choice = frontend.post("/v1/completions", **body).json()["choices"][0]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 5
    events = frontend.post("/v1/completions", stream=True, **body).text.split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if '"choices":[{' in event]
    assert all(part["text"] == "" for part in choices)
    assert [token for part in choices for token in part.get("token_ids", [])] == choice["token_ids"]
    for path, field in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = frontend.post(path, **field)
        assert response.status_code == 400, response.text
    assert "--skip-tokenizer-init" in frontend.post("/v1/completions", prompt="a").json()["error"]["message"]
