# SPDX-License-Identifier: Apache-2.0
"""Load: 64 streams of mixed lengths, a tenth of which hang up. Nothing leaks and no token is wrong.

The gate runs it briefly with a tiny model; `make test-all` for a minute with the default model, and for ten minutes
(BLINK_SOAK_SECONDS) with traces, logs and views on.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from blink.models.weights.files import default_model_path
from processes import Engine, measure, open_files, resident_mib, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 64
_VIEWS_SECONDS = float(os.environ.get("BLINK_SOAK_SECONDS", "600"))
NUM_PROMPTS = 12


def make_jobs(count: int) -> list[tuple[list[int], int]]:
    """Prompts (token ids) of 1 to 200 tokens, some with a common beginning, and how many tokens to generate."""
    chance = random.Random(11)
    common = [chance.randrange(100, 40000) for _ in range(64)]
    lengths = [chance.choice((1, 7, 16, 33, 90, 200)) for _ in range(count)]
    prompts = [[chance.randrange(100, 40000) for _ in range(length)] for length in lengths]
    return [(common + p if i % 3 == 0 else p, chance.randrange(2, 40)) for i, p in enumerate(prompts)]


def body_of(job: tuple[list[int], int], *, stream: bool) -> dict[str, object]:
    prompt, count = job
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 1,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


async def run_stream(
    client: httpx.AsyncClient, job: tuple[list[int], int], hang_up_after: int | None
) -> list[int] | None:
    """Return the streamed token ids, or None if we hung up."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body_of(job, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            tokens += chunk["choices"][0].get("token_ids") or []
            if hang_up_after is not None and len(tokens) >= hang_up_after:
                return None
    return tokens


async def soak(
    url: str, jobs: list[tuple[list[int], int]], expected: list[list[int]], seconds: float
) -> tuple[int, int]:
    """Keep 64 streams open until the time is up and some have hung up; return how many ended and how many hung up."""
    chance = random.Random(5)
    end = time.monotonic() + seconds
    finished = hung_up = 0

    async def keep_streaming(client: httpx.AsyncClient) -> None:
        nonlocal finished, hung_up
        while time.monotonic() < end or finished <= STREAMS or not hung_up:
            place = chance.randrange(len(jobs))
            hang_up_after = chance.randrange(0, 8) if chance.random() < 0.1 else None
            tokens = await run_stream(client, jobs[place], hang_up_after)
            if tokens is None:
                hung_up += 1
            else:
                assert tokens == expected[place]
                finished += 1

    limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(keep_streaming(client) for _ in range(STREAMS)))
    return finished, hung_up


@pytest.mark.timeout(300)
def test_64_streams_with_hang_ups_leak_nothing_and_err_nowhere(tiny_engine: Engine) -> None:
    soak_and_check(tiny_engine, f"--tokenizer={default_model_path()}", seconds=2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_64_streams_of_the_default_model_for_a_minute(engine: Engine) -> None:
    soak_and_check(engine, seconds=60)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_64_streams_for_ten_minutes_with_all_that_looks_on_turned_on(tiny_engine: Engine) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    from otlp_receiver import Receiver

    collector = Receiver()
    flags = [f"--otlp-traces-endpoint={collector.url}", "--log-format=json", "--enable-log-requests"]
    flags += ["--keep-alive-timeout=60"]  # the client keeps connections for five seconds too
    try:
        with looks(tiny_engine.region):
            soak_and_check(tiny_engine, f"--tokenizer={default_model_path()}", *flags, seconds=_VIEWS_SECONDS / 2)
        assert len(collector.spans) > STREAMS
    finally:
        collector.close()


@contextmanager
def looks(region: str) -> Iterator[None]:
    """Watch a region by `blink top`, and write its timeline again and again."""
    command = [sys.executable, "-m", "blink"]
    top = subprocess.Popen([*command, "top", f"--region={region}", "--json"], stdout=subprocess.DEVNULL)
    trace = [*command, "trace", f"--region={region}", "--duration=20", "--output=/dev/null"]
    tracer = subprocess.Popen(["sh", "-c", f"while :; do {shlex.join(trace)} || exit 1; done"], start_new_session=True)
    try:
        yield
        assert top.poll() is None and tracer.poll() is None, "a view gave up"
    finally:
        os.killpg(tracer.pid, signal.SIGTERM)
        tracer.wait()
        stop(top)


def soak_and_check(engine: Engine, *flags: str, seconds: float) -> None:
    frontend = start_frontend(engine.region, *flags)
    processes = [frontend.process, engine.process]
    try:
        jobs = make_jobs(NUM_PROMPTS)
        expected = [
            frontend.post("/v1/completions", **body_of(job, stream=False)).json()["choices"][0]["token_ids"]
            for job in jobs
        ]
        assert [len(tokens) for tokens in expected] == [count for _, count in jobs]
        asyncio.run(fill_every_step(frontend.url))
        # The same once before: what grows then are caches of shapes, and what grows afterwards is a leak.
        asyncio.run(soak(frontend.url, jobs, expected, seconds))
        frontend.wait_until_idle()
        files, memory = measure(processes, open_files), measure(processes, resident_mib)

        finished, hung_up = asyncio.run(soak(frontend.url, jobs, expected, seconds))
        assert finished > STREAMS
        assert hung_up > 0

        frontend.wait_until_idle()
        wait_for(lambda: measure(processes, open_files) <= files, 60)
        assert frontend.metric("vllm:kv_cache_usage_perc") == 0
        assert frontend.metric("blink:prompt_arena_used_bytes") == 0
        assert frontend.metric("blink:worker_sequences") == 0
        grown = [after - before for before, after in zip(memory, measure(processes, resident_mib), strict=True)]
        assert max(grown) < 48, f"frontend and engine grew by {grown} MiB"
    finally:
        stop(frontend.process)


async def fill_every_step(url: str) -> None:
    """Make steps as large as they can be, so that buffers reach their size: the longest sequences on all streams."""
    longest = ([7] * 264, 39)
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        await run_stream(client, longest, None)  # the others find its prompt in the prefix cache
        await asyncio.gather(*(run_stream(client, longest, None) for _ in range(STREAMS)))
