# SPDX-License-Identifier: Apache-2.0
"""Requests with a target of their time per output token, over HTTP: steps wait for them, and say so."""

from __future__ import annotations

from typing import Any

import pytest

from processes import Frontend

pytestmark = pytest.mark.e2e
TARGET_MS, TOKENS = 40, 8
BODY: dict[str, Any] = {"prompt": list(range(100, 140)), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def held_seconds(server: Frontend) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("blink:held_seconds_total"))


def generate(server: Frontend, **fields: Any) -> tuple[str, float]:
    """Return a request's text, and how long steps were held meanwhile."""
    before = held_seconds(server)
    answer = server.http.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"], held_seconds(server) - before


def test_steps_wait_for_a_request_with_a_target_and_the_text_is_the_same(tiny_server: Frontend) -> None:
    text, held = generate(tiny_server)
    assert held == 0
    assert generate(tiny_server, tpot_target_ms=0) == (text, 0)
    paced, held = generate(tiny_server, tpot_target_ms=TARGET_MS)
    assert paced == text
    assert 0 < held < TOKENS * TARGET_MS / 1000


@pytest.mark.parametrize("target", [-1, 20_000, "soon"])
def test_a_target_out_of_range_is_refused_by_name(tiny_server: Frontend, target: object) -> None:
    answer = tiny_server.http.post("/v1/completions", json=BODY | {"tpot_target_ms": target})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tpot_target_ms"
