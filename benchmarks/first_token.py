# SPDX-License-Identifier: Apache-2.0
"""Where the time to the first token goes, part by part, of single streamed requests.

The frontend logs its stamps (--enable-log-timings), the scheduler's trace ring has those of the steps; both clocks are
compared by submissions that the scheduler refuses at once. Starts engine and frontend, or takes a running server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from engine_client import connect, ping

from blink.link.client import EngineClient
from blink.region.memory import open_region

MARK = "first token "
PINGS = 300
BOOT_SECONDS = 600
# What lies between two stamps; the client's are called sent and seen.
PARTS = {
    "send": ("sent", "received"),
    "parse": ("received", "parsed"),
    "tokenize": ("parsed", "tokenized"),
    "submit": ("tokenized", "submitted"),
    "wait": ("submitted", "launched"),
    "step": ("launched", "ended"),
    "collect": ("ended", "collected"),
    "write": ("collected", "written"),
    "deliver": ("written", "seen"),
    "last byte to launch": ("received", "launched"),
    "end of step to socket": ("ended", "written"),
    "TTFT": ("sent", "seen"),
}


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, its region, and the file of its log."""

    port: int
    region: str
    log: Path


@contextmanager
def start_server(options: argparse.Namespace) -> Iterator[Server]:
    """Run an engine and one frontend."""
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    shared = [sys.executable, "-m", "blink"]
    engine = [*shared, "engine", str(options.model), f"--region={region}", f"--device={options.device}"]
    engine += ["--load-format=dummy", "--no-enable-prefix-caching", f"--max-model-len={options.max_model_len}"]
    tokenizer = [f"--tokenizer={options.tokenizer}"] if options.tokenizer else ["--skip-tokenizer-init"]
    frontend = [
        *shared,
        "frontend",
        str(options.model),
        f"--region={region}",
        f"--port={port}",
        "--enable-log-timings",
        *tokenizer,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "frontend.log"
        with log.open("wb") as sink:
            children = [subprocess.Popen([*engine, *options.engine_flag])]
            children.append(subprocess.Popen([*frontend, *options.frontend_flag], stderr=sink))
        try:
            if not await_server(port, children):
                raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
            yield Server(port, region, log)
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait(60)


def await_server(port: int, children: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until the server answers; tell whether it does."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline and all(child.poll() is None for child in children):
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def compare_clocks(client: EngineClient) -> tuple[float, float]:
    """Return the engine's clock minus this host's, and how wrong that can be, in ns.

    A pass that answers a ping read its clock between the ping's two stamps, but for the time of the pass itself. The
    quickest of many counts.
    """
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        before, passed, after = ping(client)
        best = min(best, (after - before, passed - (before + after) / 2))
        time.sleep(1e-4)
    return best[1], best[0] / 2


def encode_request(prompt: object, new_tokens: int, request_id: str) -> bytes:
    """Return a streamed completion request."""
    fields = {"prompt": prompt, "max_tokens": new_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask(connection: socket.socket, request: bytes) -> tuple[int, int]:
    """Send a request and read its answer; return when it was sent and when its first token was seen."""
    sent, seen, tail = time.monotonic_ns(), 0, b""
    connection.sendall(request)
    while b"data: [DONE]\n\n\r\n0\r\n\r\n" not in tail:
        part = connection.recv(1 << 16)
        now = time.monotonic_ns()
        if not part or tail.startswith(b"HTTP/1.1 4"):
            raise SystemExit(f"the request failed: {tail!r}")
        tail = (tail + part)[-4096:]
        if not seen and b"data: " in tail:
            seen = now
    return sent, seen


def read_stamps(log: Path, request_id: str) -> dict[str, int]:
    """Return what the frontend has logged of a request."""
    for line in log.read_text().splitlines():
        if MARK in line and request_id in line:
            return json.loads(line.partition(MARK)[2])
    raise SystemExit(f"{log} has no times of {request_id}: start the frontend with --enable-log-timings")


def find_step(trace: npt.NDArray[np.void], collected: float) -> tuple[float, float]:
    """Return launch and end of the last step that had ended at `collected`, by the engine's clock."""
    trace = np.sort(trace[trace["step"] > 0], order="step")
    after = trace[trace["retired_ns"].astype(np.float64) <= collected][-1]
    made = trace[trace["step"] == after["step"] - np.uint64(1)][-1]
    return float(made["launched_ns"]), float(after["retired_ns"])


def measure(server: Server, options: argparse.Namespace) -> dict[str, npt.NDArray[np.float64]]:
    """Send the requests one by one; return the parts of each in us."""
    client = connect(server.region)
    offset, error = compare_clocks(client)
    assert client.info is not None
    chance, vocab_size = np.random.default_rng(0), client.info.vocab_size
    client.close()
    print(f"engine's clock - host's: {offset / 1e3:.1f} us, known to {error / 1e3:.1f} us")
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    trace = open_region(server.region).trace()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(-options.warmup, options.requests):
            time.sleep(options.pause * chance.uniform(0.5, 1.5))
            tokens = chance.integers(0, vocab_size, options.prompt_tokens).tolist()
            prompt = " ".join(f"word{token}" for token in tokens)[: 4 * len(tokens)] if options.text else tokens
            request_id = secrets.token_hex(8)
            sent, seen = ask(connection, encode_request(prompt, options.new_tokens, request_id))
            stamps: dict[str, float] = {**read_stamps(server.log, request_id), "sent": sent, "seen": seen}
            launched, ended = find_step(trace.copy(), stamps["collected"] + offset + error)
            stamps |= {"launched": launched - offset, "ended": ended - offset}
            for part, (start, end) in PARTS.items():
                if number >= 0:
                    found[part].append((stamps[end] - stamps[start]) / 1e3)
    return {part: np.array(times) for part, times in found.items()}


def keep_busy(port: int, num_streams: int, new_tokens: int) -> None:
    """Keep streams open for ever (a process of its own)."""

    async def stream() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(encode_request([1000, 1001], new_tokens, secrets.token_hex(8)))
            while b"data: [DONE]" not in await reader.read(1 << 16):
                pass
            writer.close()

    async def run() -> None:
        await asyncio.gather(*(stream() for _ in range(num_streams)))

    asyncio.run(run())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="directory with a config.json; weights are random")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--tokenizer", type=Path, help="directory or .gguf file; needed for --text")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--engine-flag", action="append", default=[], help="one more flag of `blink engine`")
    parser.add_argument("--frontend-flag", action="append", default=[], help="one more flag of `blink frontend`")
    parser.add_argument("--port", type=int, help="take the running server on this port, with --region and --log")
    parser.add_argument("--region", default="blink")
    parser.add_argument("--log", type=Path, help="file that has the running frontend's stderr")
    parser.add_argument("--text", action="store_true", help="prompts are texts, not token ids")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of a text: about")
    parser.add_argument("--new-tokens", type=int, default=4, help="of each request; at least 2")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.1, help="mean seconds between two requests")
    parser.add_argument("--beside", type=int, default=0, help="sequences that decode meanwhile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if (options.model is None) == (options.port is None):
        parser.error("give a model, or the port of a running server")
    return options


def report(found: dict[str, npt.NDArray[np.float64]], output: Path | None) -> None:
    """Print the parts."""
    print(f"{'part':<24} {'p50 us':>9} {'p95 us':>9}")
    table: dict[str, dict[str, float]] = {}
    for part, times in found.items():
        p50, p95 = np.percentile(times, [50, 95])
        table[part] = {"p50_us": float(p50), "p95_us": float(p95)}
        print(f"{part:<24} {p50:>9.0f} {p95:>9.0f}")
    if output:
        output.write_text(json.dumps(table, indent=1))


def run(server: Server, options: argparse.Namespace) -> None:
    """Measure beside as many streams as asked for."""
    streams = multiprocessing.Process(
        target=keep_busy, args=(server.port, options.beside, options.max_model_len - 10), daemon=True
    )
    if options.beside:
        streams.start()
        time.sleep(2)
    try:
        report(measure(server, options), options.output)
    finally:
        if options.beside:
            streams.kill()


def main() -> None:
    options = parse_options()
    if options.port is not None:
        run(Server(options.port, options.region, options.log), options)
        return
    with start_server(options) as server:
        run(server, options)


if __name__ == "__main__":
    main()
