# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of several engines at one port, next to one, with as many sequences for each engine.

Every stream decodes the same number of tokens; all begin at once, on prompts that share nothing. There are as many
client processes as engines. TPOT tells whether the engines slow each other: with equal TPOT, N engines give N times the
tokens. Each engine has room for twice its sequences, as a frontend may give one a sequence more than the other. Flags
behind -- go to `blink serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

BOOT_SECONDS = 1800
STOP_SECONDS = 60


@dataclass(frozen=True)
class Run:
    """What one run of all streams gave."""

    tokens_per_second: float  # from the first token of all streams to the last
    tpot_ms: float  # median over the streams


@contextmanager
def serve(replicas: int, options: argparse.Namespace) -> Iterator[int]:
    """Run a server with so many engines; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "blink", "serve", options.model, f"--data-parallel-size={replicas}"]
    command += [f"--port={port}", f"--max-num-seqs={2 * max(options.rows)}", "--max-client-share=1", *options.flags]
    process = subprocess.Popen(command)
    try:
        wait_until_whole(process, port, replicas)
        yield port
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def wait_until_whole(process: subprocess.Popen[bytes], port: int, replicas: int) -> None:
    """Return when the frontend is connected to all engines."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False).text
        except httpx.TransportError:
            page = ""
        up = [line for line in page.splitlines() if line.startswith("blink:engine_up{") and line.endswith(" 1.0")]
        if len(up) == replicas:
            return
        time.sleep(0.2)
    raise SystemExit("the server does not become ready")


async def stream(port: int, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """Run one stream; return when its first and its last token came (monotonic seconds)."""
    asked = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first = last = 0.0
    usage = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            if event["choices"]:
                last = time.monotonic()
                first = first or last
            elif event.get("usage"):
                usage = event["usage"]["completion_tokens"]
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    if usage != num_tokens:
        raise SystemExit(f"a stream had {usage} tokens instead of {num_tokens}")
    return first, last


def run_client(port: int, count: int, prompt_tokens: int, num_tokens: int) -> list[tuple[float, float]]:
    """Run streams at once, in one process; return when the first and the last token of each came."""
    prompts = [[random.randrange(1000, 2000) for _ in range(prompt_tokens)] for _ in range(count)]

    async def run() -> list[tuple[float, float]]:
        return await asyncio.gather(*(stream(port, prompt, num_tokens) for prompt in prompts))

    return asyncio.run(run())


def run_streams(clients: ProcessPoolExecutor, replicas: int, rows: int, port: int, options: argparse.Namespace) -> Run:
    """Run all streams at once, those of one engine's number in each client."""
    count = replicas * rows
    sizes = options.prompt_tokens, options.tokens
    parts = [clients.submit(run_client, port, rows, *sizes) for _ in range(replicas)]
    times = [one for part in parts for one in part.result()]
    span = max(last for _, last in times) - min(first for first, _ in times)
    tpot = statistics.median((last - first) / (options.tokens - 1) for first, last in times)
    return Run(count * (options.tokens - 1) / span, tpot * 1e3)


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the medians of each number of engines and rows."""
    rows: list[dict[str, float]] = []
    for replicas in options.replicas:
        spawn = multiprocessing.get_context("spawn")
        with serve(replicas, options) as port, ProcessPoolExecutor(replicas, mp_context=spawn) as clients:
            for per_engine in options.rows:
                several = (replicas, per_engine, port, options)
                run_streams(clients, *several)  # warms up
                runs = [run_streams(clients, *several) for _ in range(options.runs)]
                rate = statistics.median(run.tokens_per_second for run in runs)
                tpot = statistics.median(run.tpot_ms for run in runs)
                rows.append({"engines": replicas, "rows": per_engine, "tokens_per_second": rate, "tpot_ms": tpot})
    return rows


def compare(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return each row with its ratios to that of the fewest engines and as many sequences for each."""
    base = {row["rows"]: row for row in reversed(rows)}
    return [
        {**row, **{f"{name}_ratio": row[name] / base[row["rows"]][name] for name in ("tokens_per_second", "tpot_ms")}}
        for row in rows
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="as for `blink serve`")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="numbers of engines, the fewest first")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="sequences for each engine")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="generated tokens of a stream")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the median counts")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    words = sys.argv[1:]
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser.parse_args(own, argparse.Namespace(flags=flags))
    rows = compare(measure(options))
    print("engines  rows each  tokens/s  (ratio)  TPOT ms  (ratio)")
    for row in rows:
        print(
            f"{row['engines']:7.0f}  {row['rows']:9.0f}  {row['tokens_per_second']:8.1f}  "
            f"{row['tokens_per_second_ratio']:7.2f}  {row['tpot_ms']:7.2f}  {row['tpot_ms_ratio']:7.2f}"
        )
    if options.output:
        options.output.write_text(json.dumps({"command": words, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
