# SPDX-License-Identifier: Apache-2.0
"""A server that is told to stop, as Kubernetes does: open requests end, and probes see that it takes no new ones."""

from __future__ import annotations

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from model_families import save_model
from processes import run_engine, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
_TOKENS = 120  # with the pace below five seconds, in which a busy frontend too must have closed its socket


def test_health_is_503_while_open_requests_end(tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path / "model")
    model = (str(tmp_path / "model"), "--skip-tokenizer-init")
    sizes = ("--max-num-seqs=4", "--num-gpu-blocks-override=100", "--dtype=float32", "--tpot-target-ms=40")
    with run_engine(*model, *sizes) as engine, ThreadPoolExecutor(1) as pool:
        frontend = start_frontend(engine.region, *model)
        probe = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=60)

        def health() -> int:
            probe.request("GET", "/health")
            response = probe.getresponse()
            response.read()
            return response.status

        def complete() -> list[int]:
            body = {"prompt": [5, 9, 30], "max_tokens": _TOKENS, "ignore_eos": True, "return_token_ids": True}
            answer = httpx.post(f"{frontend.url}/v1/completions", content=json.dumps(body), timeout=60, trust_env=False)
            return answer.raise_for_status().json()["choices"][0]["token_ids"]

        assert health() == 200
        open_request = pool.submit(complete)
        wait_for(lambda: "vllm:num_requests_running" in _running(frontend.url), 30)
        frontend.process.send_signal(signal.SIGTERM)
        wait_for(lambda: health() == 503, 60)
        wait_for(lambda: _is_closed(frontend.url), 60)  # it closes its socket a moment later
        assert not open_request.done()
        assert len(open_request.result(60)) == _TOKENS
        probe.close()
        assert frontend.process.wait(30) == 0
        stop(frontend.process)


def _is_closed(url: str) -> bool:
    """Tell whether a new connection is refused."""
    try:
        httpx.get(f"{url}/health", timeout=60, trust_env=False)
    except httpx.TransportError as error:  # a connection that the socket had not accepted is reset as it closes
        return isinstance(error, httpx.ConnectError)
    return False


def _running(url: str) -> str:
    """Return the line that counts running sequences, once there are some."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return next((line for line in lines if line.startswith("vllm:num_requests_running") and line.endswith(" 1.0")), "")
