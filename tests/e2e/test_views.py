# SPDX-License-Identifier: Apache-2.0
"""What an operator looks with: `blink top`, `blink trace`, the page, JSON logs, and the switch of the prefix cache."""

from __future__ import annotations

import itertools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink.view.config import TopConfig, TraceConfig
from blink.view.timeline import run_trace
from blink.view.top import run_top
from ports import free_port
from processes import Engine, Frontend, under_load, wait_for

pytestmark = pytest.mark.e2e
PROMPT = list(range(100, 180))
LOAD: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("source", ["url", "region"])
def test_top_shows_a_loaded_server_from_its_url_and_from_its_region(
    tiny_engine: Engine, tiny_server: Frontend, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, region = (tiny_server.url, "") if source == "url" else ("", tiny_engine.region)
    with under_load(tiny_server.url, **LOAD):
        figures: dict[str, Any] = {}

        def is_at_work() -> bool:
            run_top(TopConfig(url=url, region=region, once=True, json=True, interval=0.4))
            figures.update(json.loads(capsys.readouterr().out))
            is_busy = figures["token_rate"] > 0 and figures["prompt_rate"] > 0
            return is_busy and figures["finished"]["length"] > 0 and None not in (figures["ttft"], figures["tpot"])

        wait_for(is_at_work, 300)
        run_top(TopConfig(url=url, region=region, once=True, interval=0.1))
        screen = capsys.readouterr().out
    assert figures["model"] == "tiny" and figures["is_up"]
    assert 0 <= figures["kv_use"] < 1
    assert 0 < figures["step_seconds"] < 10 and 0 < figures["busy"] <= 1
    assert 0 < figures["tpot"][0] <= figures["tpot"][1] and figures["ttft"][0] > 0
    frontend = next(each for each in figures["frontends"] if each["name"] == str(tiny_server.process.pid))
    assert frontend["tokens_per_second"] > 0
    assert "a step takes" in screen and "best-effort" in screen and f"process {tiny_server.process.pid}" in screen


def test_top_in_a_terminal_ends_with_q_and_leaves_the_terminal_as_it_was(tiny_engine: Engine) -> None:
    command = [sys.executable, "-m", "blink", "top", f"--region={tiny_engine.region}", "--interval=0.2"]
    outside, inside = pty.openpty()
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    seen = b""
    while b"model at work" not in seen:
        seen += os.read(outside, 65536)
    os.write(outside, b"q")
    while True:
        try:
            seen += os.read(outside, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(60) == 0
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen  # the other screen, and back
    os.close(outside)


@pytest.mark.parametrize("duration", [0.0, 0.2])
def test_a_trace_holds_every_step_with_its_parts(
    tiny_engine: Engine, tiny_server: Frontend, duration: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    document: dict[str, Any] = {}
    slices: list[Any] = []
    steps: list[Any] = []
    seconds = duration
    with under_load(tiny_server.url, **LOAD):
        tiny_server.complete(PROMPT)
        while not steps:  # a busy machine may take longer than that for a step
            run_trace(TraceConfig(region=tiny_engine.region, duration=seconds, output=str(file)))
            document = json.loads(file.read_text())
            slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
            steps = [event for event in slices if event["tid"] == 1]
            seconds *= 2
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"{len([e for e in slices if e['tid'] == 2])} steps" in said and "missed" not in said
    numbers = [event["args"]["step"] for event in steps]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    assert all(event["dur"] > 0 for event in steps)
    assert all(event["ts"] + event["dur"] <= after["ts"] for event, after in itertools.pairwise(steps))
    if not duration:  # the last thousands of steps, prompts among them
        assert {event["name"].split()[0] for event in steps} == {"decode", "mixed"}
        admitted = [event["args"]["count"] for event in document["traceEvents"] if event.get("cat") == "admitted"]
        assert sum(admitted) >= 2
    counters = {event["name"] for event in document["traceEvents"] if event["ph"] == "C"}
    assert counters == {"sequences", "tokens in the step", "free KV blocks"}


def test_a_region_that_nobody_serves_is_one_clear_error() -> None:
    command = [sys.executable, "-m", "blink", "trace", "--region=nobody"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (2, "blink: error: no engine serves the region 'nobody'\n")


def test_resetting_the_prefix_cache_makes_the_next_prompt_new(tiny_server: Frontend) -> None:
    def cached() -> int:
        usage = tiny_server.complete(PROMPT, max_tokens=1)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() == 64
    foreign = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    assert tiny_server.http.post("/reset_prefix_cache", headers=foreign, content="").status_code == 400
    assert cached() == 64
    response = tiny_server.http.post("/reset_prefix_cache")
    assert (response.status_code, response.content) == (200, b"")
    assert cached() == 0
    assert cached() == 64


def test_the_next_turn_of_a_conversation_finds_the_answer_too(tiny_server: Frontend) -> None:
    answer = tiny_server.complete(PROMPT[:40], max_tokens=60, ignore_eos=True, return_token_ids=True)
    history = PROMPT[:40] + answer["choices"][0]["token_ids"] + [7, 8, 9]
    found = tiny_server.complete(history, return_token_ids=True)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # of 99 computed tokens
    tiny_server.post("/reset_prefix_cache")
    computed = tiny_server.complete(history, return_token_ids=True)
    assert computed["choices"][0]["token_ids"] == found["choices"][0]["token_ids"]


def test_a_frontend_that_logs_json_says_nothing_else_and_has_no_page_if_told_so(tiny_engine: Engine) -> None:
    port = free_port()
    command = [sys.executable, "-m", "blink", "frontend", f"--region={tiny_engine.region}", f"--port={port}"]
    command += ["--skip-tokenizer-init", "--log-format=json", "--no-page", "--api-key=secret", "--enable-log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _status(f"{url}/health") == 200, 300)
        assert _status(f"{url}/") == 404
        assert httpx.post(f"{url}/reset_prefix_cache", trust_env=False).status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, trust_env=False) as http:
            for stream in (False, True):
                body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "stream": stream}
                assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/completions", json={"prompt": []}).status_code == 400
        process.terminate()
        _, said = process.communicate(timeout=60)
    entries = [json.loads(line) for line in said.splitlines()]
    assert f"serving on {url}" in [entry["message"] for entry in entries]
    assert all(entry["level"] == "info" and entry["process"] == process.pid for entry in entries)
    ends = [entry for entry in entries if "finish_reasons" in entry]
    assert [(e["prompt_tokens"], e["completion_tokens"], e["finish_reasons"]) for e in ends] == 2 * [(3, 4, ["length"])]
    assert all(0 < entry["seconds"] < 60 and entry["request_id"] in entry["message"] for entry in ends)
    assert [entry["path"] for entry in entries if entry.get("status") == 400] == ["/v1/completions"]


def _status(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False).status_code
    except httpx.TransportError:
        return 0
