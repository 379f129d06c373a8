# SPDX-License-Identifier: Apache-2.0
"""Answers of all endpoints, byte by byte as they were recorded (tests/shared/recorded_api.py says how)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import recorded_api
from api_cases import list_cases
from recorded_api import list_differences, play_all, read_recording


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return play_all(list_cases())


def test_all_answers_are_as_recorded(answers: dict[str, dict[str, Any]]) -> None:
    differences = list_differences(read_recording(), answers)
    assert not differences, "\n".join(["Recorded (-) and answered now (+):", *differences])


@pytest.mark.parametrize(
    ("servers", "least"), [(("tools", "guarded", "away", "full"), 50), pytest.param((), 300, marks=pytest.mark.long)]
)
def test_answers_are_the_same_where_asserts_are_not_executed(servers: tuple[str, ...], least: int) -> None:
    command = [sys.executable, "-O", recorded_api.__file__, "--check", *servers]
    played = subprocess.run(command, capture_output=True, text=True)
    assert played.returncode == 0, played.stdout + played.stderr
    assert int(played.stdout.split()[0]) >= least


def test_every_endpoint_is_asked_rightly_and_wrongly(answers: dict[str, dict[str, Any]]) -> None:
    asked: dict[tuple[str, str], set[int]] = {}
    for key, answer in answers.items():
        request = json.loads(key)
        asked.setdefault((request["method"], request["path"]), set()).add(answer["status"])
    document = json.loads(answers['{"server": "plain", "method": "GET", "path": "/openapi.json"}']["body"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found = [paths for paths in asked if paths[0] == method.upper() and _fits(paths[1], path)]
            assert found, f"{method.upper()} {path} has no case in api_cases.py"
            # What these change is changed in tests/e2e/test_lora_http.py and test_pause_http.py.
            changes = (
                *("_lora_adapter", "_weights_from_disk", "_weights_from_tensor", "_weights_from_distributed"),
                *("_weights_update_group", "_weight_update", "_weight_transfer_engine", "/update_weights"),
            )
            if "requestBody" in operation and not path.endswith(changes):
                assert {200, 400, 503} <= asked[method.upper(), path]


def _fits(path: str, template: str) -> bool:
    """Say whether a path is one of a route's."""
    parts, wanted = path.split("/"), template.split("/")
    return len(parts) == len(wanted) and all(a == b or b[:1] == "{" for a, b in zip(parts, wanted, strict=True))
