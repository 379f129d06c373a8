# SPDX-License-Identifier: Apache-2.0
"""Two engines at one port: they answer as one does, share prompts by their beginning, and one may die alone."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes import Frontend, children_of, wait_for
from served import PATIENCE, Served, served
from streams import finish, open_streams

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

_FLAGS = ["--data-parallel-size=2", "--max-model-len=1024", "--num-gpu-blocks-override=2048", "--max-num-seqs=32"]
_FLAGS += ["--max-num-batched-tokens=512", "--max-client-share=1"]
_LONG = 300  # tokens: some seconds


class Pair(Served):
    """A server with two engines."""

    @property
    def http(self) -> httpx.Client:
        if not hasattr(self, "_http"):
            limits = httpx.Limits(max_connections=200, keepalive_expiry=1)  # before the server ends idle ones
            url = f"http://127.0.0.1:{self.port}"
            self._http = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, verify=False, limits=limits)
        return self._http

    def complete(self, prompt: object, **body: object) -> dict[str, Any]:
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
        return self.http.post("/v1/completions", json=asked).raise_for_status().json()

    def metric(self, name: str, engine: int) -> float:
        """The sum of a metric's samples of one engine."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if re.match(rf'{re.escape(name)}{{.*engine="{engine}"', line)
        )

    def engine(self, index: int) -> int:
        """The process of an engine."""
        [found] = children_of(self.process.pid, f"--region={self.region}.dp{index}")
        return found

    def is_up(self, engine: int) -> bool:
        return self.metric("blink:engine_up", engine) == 1

    def wait_until_whole(self) -> None:
        wait_for(lambda: self.is_up(0) and self.is_up(1), PATIENCE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with served(tmp_path_factory.mktemp("pair"), *_FLAGS, kind=Pair) as server:
        server.wait_until_whole()
        yield server


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [1000 + number] * length


def test_both_engines_answer_as_one_does(pair: Pair, tiny_server: Frontend) -> None:
    alone = tiny_server.complete(prompt_of(1), max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    before = [pair.metric("vllm:request_success_total", engine) for engine in (0, 1)]
    # With salts of their own, the requests share no blocks: so they go to either engine.
    answers = [pair.complete(prompt_of(1), max_tokens=30, cache_salt=str(salt)) for salt in range(16)]
    assert {answer["choices"][0]["text"] for answer in answers} == {alone}
    given = [pair.metric("vllm:request_success_total", engine) - before[engine] for engine in (0, 1)]
    assert sum(given) == 16 and min(given) > 0


def test_prompts_with_one_beginning_go_to_one_engine(pair: Pair) -> None:
    hits = [pair.metric("vllm:prefix_cache_hits_total", engine) for engine in (0, 1)]
    for number in range(100, 116):
        beginning = prompt_of(number, 64)
        cached = [
            pair.complete([*beginning, tail], max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for tail in (7, 8, 9)
        ]
        assert cached == [0, 64, 64]
    grown = [pair.metric("vllm:prefix_cache_hits_total", engine) - hits[engine] for engine in (0, 1)]
    assert sum(grown) == 16 * 128 and min(grown) > 0


def test_the_prefix_caches_of_both_engines_are_emptied(pair: Pair) -> None:
    prompts = [prompt_of(number, 64) for number in range(200, 208)]
    for prompt in prompts:
        pair.complete(prompt, max_tokens=1)
    resets = [pair.metric("blink:prefix_resets_total", engine) for engine in (0, 1)]
    pair.http.post("/reset_prefix_cache").raise_for_status()
    assert [pair.metric("blink:prefix_resets_total", engine) for engine in (0, 1)] == [count + 1 for count in resets]
    cached = [
        pair.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for prompt in prompts
    ]
    assert cached == [0] * len(prompts)


def test_metrics_name_the_engine_and_the_server_adds_them_up(pair: Pair) -> None:
    pair.complete(prompt_of(1))
    page = pair.http.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_count", "vllm:cache_config_info"):
        assert re.findall(rf'^{name}{{.*?engine="(\d)"', page, re.MULTILINE) == ["0", "1"]
    assert page.count("# TYPE vllm:generation_tokens_total counter") == 1
    told = pair.http.get("/server_info").raise_for_status().json()
    tokens = sum(pair.metric("vllm:generation_tokens_total", engine) for engine in (0, 1))
    assert told["statistics"]["generation_tokens"] == tokens > 0
    assert told["frontend"]["data_parallel_size"] == 2


def test_a_killed_engine_takes_its_own_requests_alone_and_comes_back(pair: Pair) -> None:
    victim, back = pair.engine(1), pair.was_back()
    streams = open_streams(pair.http, [prompt_of(number) for number in range(300, 316)], _LONG, PATIENCE)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: any(stream.error for stream in streams), PATIENCE)
    told = time.monotonic() - killed
    assert pair.is_ready() and pair.complete(prompt_of(1))  # the other engine serves meanwhile
    finish(streams)
    lost = [stream for stream in streams if stream.error]
    whole = [stream for stream in streams if not stream.error]
    print(f"killed: told after {told:.1f} s; {len(lost)} streams lost, {len(whole)} whole")
    assert len(lost) >= 4 and len(whole) >= 4
    for stream in lost:
        error = json.loads(stream.error)
        assert error["code"] == 503 and error["message"].startswith("The request was lost: the engine")
    pair.wait_until_back(back)
    pair.wait_until_whole()
    assert pair.engine(1) != victim and pair.says("blink: engine 1 was killed by SIGKILL")
    for stream in (whole[0], whole[-1], lost[0], lost[-1]):
        expected = pair.complete(stream.prompt, max_tokens=_LONG)["choices"][0]["text"]
        assert stream.text == expected if stream in whole else expected.startswith(stream.text) and stream.text


def test_a_stopped_engine_is_left_alone_until_it_goes_on(pair: Pair) -> None:
    stopped, starts = pair.engine(0), pair.log.read_text().count("blink: starting")
    prompts = [prompt_of(number) for number in range(400, 408)]
    streams = open_streams(pair.http, prompts, _LONG, PATIENCE)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_for(lambda: not pair.is_up(0), PATIENCE)
        began = time.monotonic()
        answers = [pair.complete(prompt, max_tokens=4) for prompt in prompts]
        print(f"stopped: {len(answers)} answers of the other engine in {time.monotonic() - began:.1f} s")
        assert pair.is_ready()
    finally:
        with suppress(ProcessLookupError):  # if it was stopped for so long that the supervisor has replaced it
            os.kill(stopped, signal.SIGCONT)
    finish(streams)
    lost = [stream for stream in streams if stream.error]
    assert 0 < len(lost) < len(streams) and all("The request was lost" in stream.error for stream in lost)
    pair.wait_until_whole()
    if pair.log.read_text().count("blink: starting") == starts:
        assert pair.engine(0) == stopped
    assert [pair.complete(prompt, max_tokens=4) for prompt in prompts]


@pytest.mark.long
def test_a_server_with_two_engines_ends_in_order(tmp_path: Path) -> None:
    with served(tmp_path, *_FLAGS, kind=Pair) as pair:
        pair.wait_until_whole()
        streams = open_streams(pair.http, [prompt_of(number) for number in range(6)], 100, PATIENCE)
        pair.process.terminate()
        finish(streams)
        assert [stream.error for stream in streams] == [""] * 6  # open requests finish
        assert pair.process.wait(PATIENCE) == 0


@pytest.mark.long
def test_many_clients_of_two_frontends_get_exact_answers_while_engines_die(tmp_path: Path) -> None:
    with served(tmp_path, *_FLAGS, "--frontend-workers=2", kind=Pair) as pair:
        pair.wait_until_whole()
        prompts = [prompt_of(number, 20 + number) for number in range(40)]
        expected = [pair.complete(prompt, max_tokens=60)["choices"][0]["text"] for prompt in prompts]
        counts = {200: 0, 503: 0}

        def ask(number: int) -> int:
            prompt = prompts[number % len(prompts)]
            body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            response = pair.http.post("/v1/completions", json=body)
            if response.status_code == 200:
                assert response.json()["choices"][0]["text"] == expected[number % len(prompts)]
            else:
                assert "The request was lost" in response.text or "Not available" in response.text
            return response.status_code

        with ThreadPoolExecutor(40) as pool:
            for turn in range(4):
                asked = [pool.submit(ask, number) for number in range(300)]
                wait_for(lambda asked=asked: sum(each.done() for each in asked) > 60, PATIENCE)
                os.kill(pair.engine(turn % 2), signal.SIGKILL)
                for each in asked:
                    counts[each.result()] += 1
                pair.wait_until_whole()
        print(f"many clients: {counts}")
        assert counts[200] + counts[503] == 1200 and counts[503] <= 4 * 40 < counts[200]
        assert pair.process.poll() is None
