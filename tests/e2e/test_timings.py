# SPDX-License-Identifier: Apache-2.0
"""--enable-log-timings: when a streamed request was how far, on the clock of the engine's trace."""

from __future__ import annotations

import json
import re

import pytest

from blink.models.weights.files import default_model_path
from blink.region.memory import open_region
from processes import Engine, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
ORDER = ("received", "parsed", "tokenized", "submitted", "collected", "written")
BODY = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_each_stream_logs_its_times_once_and_other_answers_none(
    tiny_engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}", "--enable-log-timings")
    try:
        for request_id, body in {"a": {**BODY, "stream": True}, "b": BODY, "c": {**BODY, "stream": True}}.items():
            frontend.http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
    finally:
        stop(frontend.process)
    stamps = [json.loads(line) for line in re.findall(r"first token (\{.*\})", capfd.readouterr().err)]
    assert [entry["id"] for entry in stamps] == ["cmpl-a", "cmpl-c"]
    launches = open_region(tiny_engine.region).trace()["launched_ns"]
    for entry in stamps:
        times = [entry[name] for name in ORDER]
        assert times == sorted(times)
        assert ((launches >= entry["tokenized"]) & (launches <= entry["collected"])).any(), "its step was launched then"
