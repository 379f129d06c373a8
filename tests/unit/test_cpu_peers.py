# SPDX-License-Identifier: Apache-2.0
"""benchmarks/cpu_peers.py: what is installed, how a processor is described, and how rounds are compared."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cpu_peers import Figures, compare, write_result
from peer_load import REQUESTS, AnswerError, ask, run_streams
from peer_servers import LlamaCpp, count_bytes, find_packages, find_processes, list_features, read_pss
from result_files import read_result

_FLAGS = "processor\t: 0\nflags\t\t: fpu avx avx2 fma f16c sse4_2 bmi2 avx512f amx_bf16\nbugs\t\t: spectre_v1\n"


def test_a_processor_gets_what_it_has_and_no_amx() -> None:
    found = list_features(_FLAGS)
    assert "-DGGML_AVX512=ON" in found and "-DGGML_AVX2=ON" in found and "-DGGML_AVX512_VNNI=OFF" in found
    assert not [flag for flag in found if "AMX" in flag]
    assert set(list_features("")) == {flag.replace("=ON", "=OFF") for flag in found}


def test_packages_that_others_need_are_counted_once() -> None:
    frontend, engine = find_packages("blink-serve", set()), find_packages("blink-serve", {"engine"})
    assert {"blink-serve", "fastapi", "starlette"} <= frontend < engine
    assert "torch" in engine - frontend and "sympy" in engine and "pytest" not in engine
    assert count_bytes("torch") > 100 * count_bytes("uvicorn") > 0


def test_a_process_is_found_with_those_below_it() -> None:
    async def look() -> None:
        command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("python3", "-c", command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None and process.stdin is not None
        await process.stdout.readline()
        found = list(find_processes(process.pid))
        assert len(found) == 2 and found[0] == process.pid
        assert all(read_pss(pid) > 1 << 20 for pid in found)
        process.stdin.write(b"\n")
        process.stdin.close()
        await process.wait()

    asyncio.run(look())


def test_ratios_are_those_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [Figures({"tokens/s": value}) for value in (30.0, 60.0, 20.0)]
    theirs = [Figures({"tokens/s": value}) for value in (10.0, 30.0, 10.0)]
    rows = compare(ours, theirs)
    assert rows == [["tokens/s", 30.0, 10.0, 2.0, "2.00-3.00"]]
    monkeypatch.setattr(LlamaCpp, "__init__", lambda self: setattr(self, "version", "1") or setattr(self, "slots", 16))
    options = Namespace(model=Path("m.gguf"), flags=[], prompt_tokens=8, tokens=4, rounds=3)
    path = tmp_path / "cpu_peers.json"
    path.write_text(write_result(rows, options, LlamaCpp()))  # pyright: ignore[reportCallIssue]
    assert read_result(path).tables[0].find(what="tokens/s")["ratio"] == 2


@asynccontextmanager
async def serving(num_tokens: int, gap: float) -> AsyncIterator[int]:
    """Run a server that streams so many tokens, and says how many; yield its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(num_tokens):
            writer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await writer.drain()
            await asyncio.sleep(gap)
        usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
        writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def test_gaps_and_tokens_are_those_of_the_stream() -> None:
    async def look() -> None:
        async with serving(5, 0.02) as port:
            run = await run_streams(port, 3, 4, 5)
            assert 20 <= run.itl_p99_ms < 2000
            assert 0 < run.tokens_per_second <= 3 * REQUESTS * 5 / (REQUESTS * 5 * 0.02)
            with pytest.raises(AnswerError, match="5 tokens instead of 6"):
                await ask(port, 4, 6)

    asyncio.run(look())
