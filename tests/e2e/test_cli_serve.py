# SPDX-License-Identifier: Apache-2.0
"""`blink serve` and `blink chat` as a user runs them: real processes, killed and stopped in every order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from blink.host.isolation import format_cpus
from blink.models.weights.files import default_model_path
from ports import free_port
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

_BOOT_SECONDS = 300.0
_PATIENCE = 300.0  # seconds; reached only by failures
_CPUS = sorted(os.sched_getaffinity(0))[:2]
# Bounded answers bound the time; one thread is steadier than several on a busy machine.
_SMALL = ("--max-model-len=200", "--cpu-threads=1")


class Served:
    """A running `blink serve` and what can be asked of it from outside."""

    def __init__(self, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=_PATIENCE, trust_env=False)
        self.process = subprocess.Popen(_command("serve", f"--port={port}", *_SMALL, *flags))

    def is_ready(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def children(self, command: str) -> list[int]:
        """Process ids of the living children that run `blink COMMAND`."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process.pid:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found += [int(entry.name)] * (words[1:4] == [b"-m", b"blink", command.encode()])
        return found

    def complete(self, prompt: str) -> str | None:
        """Return the greedy answer; None while there is no engine."""
        models = self.http.get("/v1/models")
        if models.status_code == 503:
            return None
        body = {"model": models.json()["data"][0]["id"], "prompt": prompt, "temperature": 0, "max_tokens": 8}
        response = self.http.post("/v1/completions", json=body)
        if response.status_code == 503:
            return None
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def metric(self, name: str) -> float:
        lines = re.findall(rf"^vllm:{name}(?:_total)?{{[^}}]*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert lines, name
        return sum(map(float, lines))

    def finish(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def _served(*flags: str) -> Iterator[Served]:
    served = Served(*flags)
    try:
        _await(served.is_ready, _BOOT_SECONDS)
        yield served
    finally:
        served.finish()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with _served("--frontend-workers=2", f"--frontend-cpus={format_cpus(_CPUS)}") as served:
        yield served


def test_each_frontend_is_on_its_core_and_the_engine_on_any(server: Served) -> None:
    expected = [[_CPUS[0]], [_CPUS[-1]]]
    assert sorted(sorted(os.sched_getaffinity(pid)) for pid in server.children("frontend")) == expected
    assert os.sched_getaffinity(server.children("engine")[0]) == os.sched_getaffinity(0)


def test_engine_killed_is_restarted_while_frontends_stay_and_answer_503(server: Served) -> None:
    before = server.complete("The capital of France is")
    assert before
    frontends, [engine] = server.children("frontend"), server.children("engine")
    assert len(frontends) == 2
    os.kill(engine, signal.SIGKILL)
    _await(lambda: server.http.get("/health").status_code == 503, _PATIENCE)
    _await(server.is_ready, _BOOT_SECONDS)
    assert server.children("engine") != [engine]
    assert sorted(server.children("frontend")) == sorted(frontends)
    _await(lambda: server.complete("The capital of France is") == before, _PATIENCE)


def test_frontend_killed_is_restarted_while_the_engine_stays(server: Served) -> None:
    [engine], frontends = server.children("engine"), server.children("frontend")
    os.kill(frontends[0], signal.SIGKILL)
    _await(lambda: len(set(server.children("frontend")) - {frontends[0]}) == 2, _PATIENCE)
    _await(server.is_ready, _PATIENCE)
    assert server.children("engine") == [engine]


def test_chat_sends_the_whole_conversation(server: Served) -> None:
    questions = ["Say the word yes.", "Now say the word no."]
    before = server.metric("request_prompt_tokens_sum")
    chat = _chat(server, "--system", "Answer in one word.", "--temperature=0", "--max-tokens=16")
    output, _ = chat.communicate("".join(f"{question}\n" for question in questions), timeout=_PATIENCE)
    assert chat.returncode == 0
    first_answer = output.split("> ", 2)[1].removesuffix("\n")
    conversation = [("system", "Answer in one word."), ("user", questions[0])]
    expected = _count_tokens(server, conversation)
    expected += _count_tokens(server, [*conversation, ("assistant", first_answer), ("user", questions[1])])
    _await(lambda: server.metric("request_prompt_tokens_sum") - before == expected, _PATIENCE)


def test_interrupt_stops_the_answer_and_frees_its_sequence(server: Served) -> None:
    chat = _chat(server, "--temperature=0")
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Write a long story about a fox.\n")
    chat.stdin.flush()
    _read_until(chat, "> ")
    _read_until(chat, " ")  # the answer has begun
    chat.send_signal(signal.SIGINT)
    _read_until(chat, "[stopped]\n> ")
    _await(lambda: server.metric("num_requests_running") == 0, _PATIENCE)
    chat.stdin.close()  # as Ctrl-D
    assert chat.wait(_PATIENCE) == 0


def test_sample_streams_the_greedy_answer_and_the_server_leaves(server: Served) -> None:
    prompt = "What is the capital of France?"
    chat = _chat(server, "--once", prompt, "--temperature", "0", "--max-tokens", "100")
    expected, _ = chat.communicate(timeout=_PATIENCE)
    assert chat.returncode == 0
    command = _command(
        "serve", "--port=0", *_SMALL, "--api-key=secret", f"--sample-prompt={prompt}", "--exit-after-sample"
    )
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_BOOT_SECONDS, check=False)
    assert run.returncode == 0
    assert run.stdout == expected != ""


def test_a_second_server_on_the_port_is_refused(server: Served) -> None:
    port = server.url.rpartition(":")[2]
    run = subprocess.run(
        _command("serve", "--port", port), capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    assert run.returncode == 2
    assert f"port {port} is in use" in run.stderr
    _await(server.is_ready, _PATIENCE)


def test_terminate_lets_an_open_request_finish_and_leaves_nothing_behind() -> None:
    with _served("--shutdown-timeout=100") as served:
        body = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 24, "stream": True}
        body["model"] = served.http.get("/v1/models").json()["data"][0]["id"]
        children = served.children("engine") + served.children("frontend")
        with served.http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert served.process.wait(_PATIENCE) == 0
    events = [line for line in rest if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(events)
    assert [child for child in children if _parent(Path(f"/proc/{child}"))] == []


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    tokenizer = f"--tokenizer={default_model_path()}"
    with _served(str(write_tiny_model(tmp_path)), "--load-format=dummy", tokenizer) as served:
        children = served.children("engine") + served.children("frontend")
        served.process.kill()
        _await(lambda: not any(_parent(Path(f"/proc/{child}")) for child in children), _PATIENCE)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", "blink", *arguments]


def _chat(server: Served, *flags: str) -> subprocess.Popen[str]:
    # A job in the background ignores SIGINT, and its children do: this one must not.
    command = ["env", "--default-signal=INT", *_command("chat", "--url", server.url, *flags)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    while not read.endswith(text):
        character = process.stdout.read(1)
        assert character, f"the output ended with {read!r}"
        read += character
    return read


def _count_tokens(server: Served, messages: list[tuple[str, str]]) -> int:
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return server.http.post("/tokenize", json=body).json()["count"]


def _parent(process: Path) -> int | None:
    """The parent's id of a living process; None for one that has ended, reaped or not."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def _await(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
