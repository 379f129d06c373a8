# SPDX-License-Identifier: Apache-2.0
"""Load: 64 streams of mixed lengths, a tenth of which hang up. Nothing leaks and no token is wrong.

The gate runs it briefly with a tiny model; `make test-all` for a minute with the default model, and for ten minutes
(BLINK_SOAK_SECONDS) with everything on: traces, logs, timings, views, scrapes, both classes, logprobs, constraints.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest

from blink.models.weights.files import default_model_path
from processes import Engine, Frontend, measure, open_files, resident_mib, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 64
_MOST_GROWN_MIB = 48
_VIEWS_SECONDS = float(os.environ.get("BLINK_SOAK_SECONDS", "600"))
_WARM_UP_SECONDS = 120.0  # at most
NUM_PROMPTS = 12
MOST_TOKENS, FEW_TOKENS = 40, 10  # what answers stay below; the latter in the gate
Job = tuple[list[int], int, dict[str, object]]  # prompt, tokens to generate, further parameters
_EXTRAS: tuple[dict[str, object], ...] = (
    {},
    {"service_tier": "flex"},
    {"logprobs": 2, "top_p": 0.9, "repetition_penalty": 1.1},
    {"structured_outputs": {"regex": "[a-z ]*"}, "service_tier": "flex"},
)


def make_jobs(count: int, extras: Sequence[dict[str, object]] = ({},), most_tokens: int = MOST_TOKENS) -> list[Job]:
    """Prompts (token ids) of 1 to 200 tokens, some with a common beginning, and how many tokens to generate."""
    chance = random.Random(11)
    common = [chance.randrange(100, 40000) for _ in range(64)]
    lengths = [chance.choice((1, 7, 16, 33, 90, 200)) for _ in range(count)]
    prompts = [[chance.randrange(100, 40000) for _ in range(length)] for length in lengths]
    kinds = itertools.cycle(extras)
    return [
        (common + p if i % 3 == 0 else p, chance.randrange(2, most_tokens), extra)
        for i, (p, extra) in enumerate(zip(prompts, kinds, strict=False))
    ]


def body_of(job: Job, *, stream: bool) -> dict[str, object]:
    prompt, count, extra = job
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 1,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        **extra,
    }


async def run_stream(client: httpx.AsyncClient, job: Job, hang_up_after: int | None) -> list[int] | None:
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


async def soak(url: str, jobs: list[Job], expected: list[list[int]], seconds: float) -> tuple[int, int]:
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


@pytest.mark.timeout(900)
def test_64_streams_with_hang_ups_leak_nothing_and_err_nowhere(tiny_engine: Engine) -> None:
    soak_and_check(tiny_engine, f"--tokenizer={default_model_path()}", seconds=2, most_tokens=FEW_TOKENS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_64_streams_of_the_default_model_for_a_minute(engine: Engine) -> None:
    soak_and_check(engine, seconds=60)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_64_streams_for_ten_minutes_with_everything_on(tiny_engine: Engine) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    from otlp_receiver import Receiver

    collector = Receiver()
    flags = [f"--otlp-traces-endpoint={collector.url}", "--log-format=json", "--enable-log-requests"]
    flags += ["--enable-log-timings"]
    try:
        with looks(tiny_engine.region):
            soak_and_check(
                tiny_engine,
                f"--tokenizer={default_model_path()}",
                *flags,
                warm_up=min(_WARM_UP_SECONDS, _VIEWS_SECONDS),
                seconds=_VIEWS_SECONDS,
                extras=_EXTRAS,
            )
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


@contextmanager
def visits(frontend: Frontend) -> Iterator[None]:
    """Do what the page and Prometheus do, and empty the prefix cache now and then."""
    is_over = threading.Event()
    failures: list[str] = []

    def visit() -> None:
        with httpx.Client(base_url=frontend.url, timeout=60, trust_env=False) as http:
            for turn in itertools.count():
                if is_over.wait(0.5):
                    return
                for path in ("/metrics", "/health", "/v1/models", "/"):
                    if http.get(path).status_code != 200:
                        failures.append(path)
                if turn % 20 == 0 and http.post("/reset_prefix_cache").status_code != 200:
                    failures.append("/reset_prefix_cache")

    visitor = threading.Thread(target=visit)
    visitor.start()
    try:
        yield
        assert visitor.is_alive() and failures == []
    finally:
        is_over.set()
        visitor.join()


def soak_and_check(
    engine: Engine,
    *flags: str,
    seconds: float,
    warm_up: float | None = None,
    extras: Sequence[dict[str, object]] = ({},),
    most_tokens: int = MOST_TOKENS,
) -> None:
    """Soak twice, the first time (for `warm_up` seconds) to fill caches; compare what both left behind."""
    frontend = start_frontend(engine.region, *flags)
    processes = [frontend.process, engine.process]
    try:
        jobs = make_jobs(NUM_PROMPTS, extras, most_tokens)
        expected = [
            frontend.post("/v1/completions", **body_of(job, stream=False)).json()["choices"][0]["token_ids"]
            for job in jobs
        ]
        assert [len(tokens) for tokens in expected] == [count for _, count, _ in jobs]
        asyncio.run(fill_every_step(frontend.url, most_tokens - 1))
        with visits(frontend) if len(extras) > 1 else nullcontext():
            # What grows at first are caches of shapes, and what grows afterwards is a leak.
            asyncio.run(soak(frontend.url, jobs, expected, seconds if warm_up is None else warm_up))
            frontend.wait_until_idle()
            files, memory = measure(processes, open_files), measure(processes, resident_mib)
            shared = shared_memory(engine.region)

            finished, hung_up = asyncio.run(soak(frontend.url, jobs, expected, seconds))
        assert finished > STREAMS
        assert hung_up > 0

        frontend.wait_until_idle()
        wait_for(lambda: measure(processes, open_files) <= files, 300)
        assert frontend.metric("vllm:kv_cache_usage_perc") == 0
        assert frontend.metric("blink:prompt_arena_used_bytes") == 0
        assert frontend.metric("blink:worker_sequences") == 0
        assert (
            shared[0] > 0
            and max(now - then for now, then in zip(shared_memory(engine.region), shared, strict=True)) <= 0
        )
        grown = find_growth(memory, measure(processes, resident_mib))
        print(f"{finished} streams, {hung_up} hung up; grew by {grown} MiB from {memory}; {files} files; {shared}")
        if max(grown) >= _MOST_GROWN_MIB:  # a leak grows each time, an allocator's caches do not
            memory = measure(processes, resident_mib)
            asyncio.run(soak(frontend.url, jobs, expected, seconds))
            frontend.wait_until_idle()
            grown = find_growth(memory, measure(processes, resident_mib))
        assert max(grown) < _MOST_GROWN_MIB, f"frontend and engine grew by {grown} MiB"
    finally:
        stop(frontend.process)


def find_growth(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return by how much each process has grown."""
    return [now - then for then, now in zip(before, after, strict=True)]


def shared_memory(region: str) -> tuple[int, int]:
    """How many files a region has in shared memory, and the KiB that they take."""
    sizes = [file.stat().st_blocks // 2 for file in Path("/dev/shm").rglob(f"*{region}*") if file.is_file()]
    return len(sizes), sum(sizes)


async def fill_every_step(url: str, most_tokens: int) -> None:
    """Make steps as large as they can be, so that buffers reach their size: the longest sequences on all streams."""
    longest: Job = ([7] * 264, most_tokens, {})
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        await run_stream(client, longest, None)  # the others find its prompt in the prefix cache
        await asyncio.gather(*(run_stream(client, longest, None) for _ in range(STREAMS)))
