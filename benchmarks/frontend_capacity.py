# SPDX-License-Identifier: Apache-2.0
"""CPU time of one frontend worker per streamed token, and what that makes of one core.

The engine is the real scheduler with a model that answers at once; the worker is a real process on its own core; the
client counts chunks. The worker's CPU time comes from the kernel's accounting, so client and engine do not count.
With --views a second worker, on the same core, has all that looks at a frontend turned on; both are loaded at once.
--views with names turns on these alone, to find out which costs what; --views none compares two equal workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.region.layout import BATCH_HEADER
from blink.region.memory import create_region, publish_region
from blink.region.native import lib

VOCAB_SIZE = 49152
PORT = 18431  # and the next one
VIEWS = ("metrics", "traces", "logs", "top")


class InstantEngine:
    """The scheduler on its thread; every step is answered after `step_seconds`, with tokens that are English words."""

    def __init__(self, region: str, max_num_seqs: int, step_seconds: float) -> None:
        config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(2048, max_num_seqs))
        geometry = build_geometry(config, max_model_len=4096, vocab_size=VOCAB_SIZE, num_blocks=max_num_seqs * 256)
        self._region = create_region(region, geometry, "instant")
        self._state = HostState(self._region)
        self._step_seconds = step_seconds
        self._sampled = self._state.array("whole.sampled_tokens", "i4")
        self._batch = self._state.array("whole.header", BATCH_HEADER)
        publish_region(self._region, region)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        loop = lib.blink_loop_start(self._state.address)
        tokens = np.arange(1000, 1000 + len(self._sampled), dtype=np.int32)
        while (kind := lib.blink_loop_wait(loop, 100)) != -2:
            if kind >= 0:
                time.sleep(self._step_seconds)
                tokens = 1000 + (tokens - 999) % 20000
                self._sampled[:] = tokens
                lib.blink_loop_finish(loop, 0)
        lib.blink_loop_stop(loop)

    def close(self) -> None:
        self._region.store_control("stop", 1)
        self._thread.join()
        self._region.path.unlink()


class Counter(asyncio.Protocol):
    """Send one request and count the chunks of its answer."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self.chunks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b'"text":')
        self._tail = (self._tail + data)[-300:]
        if b"data: [DONE]" in self._tail and not self._done.done():
            self._done.set_result(self.chunks)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError(self._tail.decode(errors="replace")))


async def stream_all(port: int, num_streams: int, num_tokens: int) -> int:
    """Run all streams of a worker at once; return the number of chunks."""
    body = json.dumps(
        {"prompt": [1000, 1001], "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(num_streams)]
    for future in futures:
        await loop.create_connection(lambda future=future: Counter(head.encode() + body, future), "127.0.0.1", port)
    return sum(await asyncio.gather(*futures))


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process, exact to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python has for threads alone


class Views:
    """What looks at a frontend: three scrapes a second, a collector of traces, JSON logs, the region's top."""

    def __init__(self, names: Sequence[str], region: str, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._is_over = threading.Event()
        self._collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
        threading.Thread(target=self._collector.serve_forever, daemon=True).start()
        endpoint = f"--otlp-traces-endpoint=http://127.0.0.1:{self._collector.server_port}"
        self.flags = [endpoint] * ("traces" in names) + ["--log-format=json"] * ("logs" in names)
        if "metrics" in names:
            threading.Thread(target=self._scrape, daemon=True).start()
        top = [sys.executable, "-m", "blink", "top", f"--region={region}", "--json"]
        self._top = subprocess.Popen(top, stdout=subprocess.DEVNULL) if "top" in names else None

    def _scrape(self) -> None:
        with httpx.Client(trust_env=False) as http:
            while not self._is_over.wait(1 / 3):
                with contextlib.suppress(httpx.TransportError):
                    http.get(self._url)

    def close(self) -> None:
        self._is_over.set()
        self._collector.shutdown()
        if self._top is not None:
            self._top.terminate()
            self._top.wait()


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def start_worker(region: str, core: int, port: int, flags: list[str]) -> subprocess.Popen[bytes]:
    command = ["taskset", "-c", str(core), sys.executable, "-m", "blink", "frontend"]
    flags = [f"--region={region}", f"--port={port}", *flags]
    worker = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            asyncio.run(stream_all(port, 1, 4))
            return worker
        except (OSError, ConnectionError):
            time.sleep(0.2)
    worker.kill()
    raise SystemExit("the frontend worker did not start")


async def measure(
    workers: dict[str, tuple[subprocess.Popen[bytes], int]], num_streams: int, num_tokens: int
) -> dict[str, dict[str, float]]:
    """Load all workers at once, so that whatever slows this machine slows each of them."""
    before, start = [cpu_seconds(process.pid) for process, _ in workers.values()], time.perf_counter()
    chunks = await asyncio.gather(*(stream_all(port, num_streams, num_tokens) for _, port in workers.values()))
    seconds, tokens = time.perf_counter() - start, num_streams * num_tokens
    runs: dict[str, dict[str, float]] = {}
    for (name, (process, _)), begun, count in zip(workers.items(), before, chunks, strict=True):
        cpu = cpu_seconds(process.pid) - begun
        runs[name] = {
            "streams": num_streams,
            "tokens": tokens,
            "tokens_per_chunk": tokens / max(count, 1),
            "us_per_token": cpu / tokens * 1e6,
            "tokens_per_second_per_core": tokens / cpu,
            "tokens_per_second_seen": tokens / seconds,
        }
    return runs


def report(name: str, runs: list[dict[str, float]]) -> dict[str, float | str]:
    """Print the median run and return it."""
    run = sorted(runs, key=lambda run: run["us_per_token"])[len(runs) // 2]
    print(
        f"{run['streams']:>8.0f} {name:>7} {run['us_per_token']:>13.2f} {run['tokens_per_second_per_core']:>18.0f}"
        f" {run['tokens_per_second_seen']:>14.0f} {run['tokens_per_chunk']:>13.2f}"
    )
    return {"worker": name, **run}


def compare(plain: list[dict[str, float]], viewed: list[dict[str, float]]) -> list[float]:
    """Print and return the share of a core's tokens/s that the views cost: quartiles over the pairs of runs, and all.

    Spans leave every five seconds: where a run is shorter, the median misses what all pairs together show.
    """
    times = [[run["us_per_token"] for run in runs] for runs in (plain, viewed)]
    costs = [1 - before / after for before, after in zip(*times, strict=True)]
    low, median, high = statistics.quantiles(costs, n=4, method="inclusive")
    whole = 1 - sum(times[0]) / sum(times[1])
    print(
        f"the views cost {median:.1%} of tokens/s per core (quartiles of {len(costs)} pairs: {low:.1%}, {high:.1%}; "
        f"all pairs together: {whole:.1%})"
    )
    return [low, median, high, whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time between tokens of a stream")
    parser.add_argument("--repeats", type=int, default=3, help="runs, or with --views pairs of runs; 2 at least")
    parser.add_argument("--core", type=int, default=1, help="core of the worker")
    parser.add_argument("--views", nargs="*", choices=[*VIEWS, "none"], help="beside one with these; alone: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {options.core})
    names = VIEWS if options.views == [] else options.views
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    engine = InstantEngine(region, (1 + bool(names)) * max(options.streams), options.step_ms / 1e3)
    workers = {"plain": (start_worker(region, options.core, PORT, []), PORT)}
    views = Views(names, region, PORT + 1) if names else None
    if views is not None:
        workers["viewed"] = start_worker(region, options.core, PORT + 1, views.flags), PORT + 1
    results: list[dict[str, float | str]] = []
    costs: list[list[float]] = []
    print(
        f"{'streams':>8} {'worker':>7} {'us CPU/token':>13} {'tokens/s per core':>18} {'tokens/s seen':>14}"
        f" {'tokens/chunk':>13}"
    )
    try:
        for streams in options.streams:
            found = [asyncio.run(measure(workers, streams, options.tokens)) for _ in range(options.repeats)]
            runs = {name: [each[name] for each in found] for name in workers}
            results += [report(name, each) for name, each in runs.items()]
            if views is not None:
                costs.append(compare(runs["plain"], runs["viewed"]))
    finally:
        for process, _ in workers.values():
            process.terminate()
            process.wait()
        if views:
            views.close()
        engine.close()
    if options.output:
        options.output.write_text(json.dumps({"runs": results, "costs_of_views": costs}, indent=1))


if __name__ == "__main__":
    main()
