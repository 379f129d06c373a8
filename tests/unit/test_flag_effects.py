# SPDX-License-Identifier: Apache-2.0
"""Flags that nothing else tests do what their help says."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from blink.api.server import add_middleware
from blink.bench.config import LoadConfig
from blink.bench.lengths import Lengths, draw_lengths
from blink.config import FrontendConfig
from ports import free_port
from processes import wait_for

_ORIGIN = "https://a.example"


def preflight(config: FrontendConfig) -> httpx.Headers:
    """Return what a browser is told before it sends a request with a header of its own."""
    app = add_middleware(FastAPI(), config)
    asked = {"Origin": _ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "X-Mine"}

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.options("/", headers=asked)

    return asyncio.run(ask()).headers


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_allowed_headers_bound_what_a_browser_may_send() -> None:
    allowed = preflight(FrontendConfig(allowed_origins=(_ORIGIN,), allowed_headers=("X-Mine",)))
    refused = preflight(FrontendConfig(allowed_origins=(_ORIGIN,), allowed_headers=("X-Other",)))
    assert "X-Mine" in allowed["access-control-allow-headers"]
    assert "X-Mine" not in refused["access-control-allow-headers"]


def test_credentials_are_allowed_only_on_demand() -> None:
    assert "access-control-allow-credentials" not in preflight(FrontendConfig(allowed_origins=(_ORIGIN,)))
    allowed = preflight(FrontendConfig(allowed_origins=(_ORIGIN,), allow_credentials=True))
    assert allowed["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(("level", "speaks"), [("info", True), ("error", False)])
def test_log_level_bounds_what_a_frontend_says(level: str, speaks: bool) -> None:
    port = free_port()
    command = [sys.executable, "-m", "blink", "frontend", "--region=test-no-engine", "--skip-tokenizer-init"]
    command += [f"--port={port}", f"--log-level={level}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as frontend:
        wait_for(lambda: listens(port), 120)
        frontend.terminate()
        _, said = frontend.communicate(timeout=300)
    assert (" INFO " in said) is speaks, said


def test_random_lengths_are_those_asked_for() -> None:
    load = LoadConfig(dataset_name="random", random_input_len=11, random_output_len=13)
    assert draw_lengths(load, 3, np.random.default_rng(1)) == [Lengths(11, 13)] * 3
