# SPDX-License-Identifier: Apache-2.0
"""Twenty published command lines of `vllm serve`, with `blink` for `vllm`: each starts and answers, or says why not.

What tests/unit/test_vllm_commands.py reads of the same lines is run here: download, weights, boot and a completion.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ports import free_port
from processes import wait_until_healthy
from published_commands import (
    CONFIGS,
    GGUF,
    NO_TENSORS,
    REFUSED,
    SMALL,
    STARTING,
    fill_in,
    make_gguf_repository,
    make_repository,
)
from published_weights import make_weights
from stub_hub import StubHub, serve_hub

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

_PATIENCE = 200.0
# What no published line says: there is no GPU here, and the test takes a free port.
_HERE = ["--device=cpu", "--cpu-threads=1", "--kv-cache-memory-bytes=64M"]


@pytest.fixture(scope="module")
def hub() -> Iterator[StubHub]:
    with serve_hub() as hub:
        yield hub


def command_of(line: str, hub: StubHub, folder: Path) -> list[str]:
    """Give the hub the line's model, with weights, and return the line's words."""
    name = line.split()[0].partition(":")[0]
    if name == GGUF:
        hub.repositories[name] = make_gguf_repository(folder)
    elif name in CONFIGS:
        hub.repositories[name] = make_repository(name, make_weights(SMALL | CONFIGS[name], folder / "weights"))
    else:
        for file, data in make_weights(SMALL | {"model_type": "llama"}, folder / "weights").items():
            (folder / file).write_bytes(data)
    return [sys.executable, "-m", "blink", "serve", *shlex.split(fill_in(line, folder))]


def environment_of(hub: StubHub, folder: Path) -> dict[str, str]:
    patience = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "100")
    return {**os.environ, **hub.environment(folder / "home"), **patience}


@pytest.mark.parametrize("line", STARTING)
def test_a_published_command_starts_and_answers(line: str, hub: StubHub, tmp_path: Path) -> None:
    words, port = command_of(line, hub, tmp_path), free_port()
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*words, *_HERE, f"--port={port}"], stderr=output, env=environment_of(hub, tmp_path)
        ) as server,
    ):
        try:
            ask_a_server(f"http://127.0.0.1:{port}", server)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_PATIENCE)
            print(log.read_text())
    assert server.returncode == 0


def ask_a_server(url: str, server: subprocess.Popen[bytes]) -> None:
    """Ask for text by each way that a client has, of the model that the server names."""
    headers = {"Authorization": "Bearer token-abc123"}  # of the one line that has a key
    with httpx.Client(base_url=url, timeout=_PATIENCE, trust_env=False, headers=headers) as client:
        wait_until_healthy(client, server, _PATIENCE)
        model = client.get("/v1/models").json()["data"][0]["id"]
        common = {"model": model, "max_tokens": 3, "ignore_eos": True}
        text = client.post("/v1/completions", json={**common, "prompt": "abc"}).raise_for_status().json()
        chat = {**common, "messages": [{"role": "user", "content": "abc"}]}
        answer = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
    assert [each["usage"]["completion_tokens"] for each in (text, answer)] == [3, 3]


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_a_published_command_is_refused_before_anything_starts(
    line: str, reason: str, hub: StubHub, tmp_path: Path
) -> None:
    name = line.split()[0]
    hub.repositories[name] = make_repository(name, {"model.safetensors": NO_TENSORS})
    command = [sys.executable, "-m", "blink", "serve", *shlex.split(line), *_HERE]
    run = subprocess.run(
        command, env=environment_of(hub, tmp_path), capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    assert run.returncode == 2
    assert reason in run.stderr
    assert "Traceback" not in run.stderr
