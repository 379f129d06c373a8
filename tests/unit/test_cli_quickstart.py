# SPDX-License-Identifier: Apache-2.0
"""`blink quickstart` shows what README and quickstart page show, and ends with the status of a step that fails."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from blink.cli.main import main
from blink.cli.quickstart import ASK, GENERATE, SERVE, STEPS, Step
from doc_pages import ROOT

_BLOCK = re.compile(r"^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.parametrize("step", [ASK, GENERATE], ids=["curl", "python"])
def test_pages_have_the_same_code(page: str, step: Step) -> None:
    assert any(step.code in block for block in _BLOCK.findall((ROOT / page).read_text()))


def test_it_prints_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart"]) == 0
    printed = re.sub(r"^    ", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert [step.code for step in STEPS if f"\n{step.code}\n" not in printed] == []
    assert SERVE.code == "blink serve"
    compile(GENERATE.code, "quickstart", "exec")


def test_another_port_is_in_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--port", "8123"]) == 0
    printed = capsys.readouterr().out
    assert "blink serve --port 8123\n" in printed and "curl http://127.0.0.1:8123/v1" in printed
    assert "8000" not in printed


def test_a_server_that_does_not_start_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "blink", "quickstart", "--run", "--port", str(port)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2
    assert f"port {port} is in use" in run.stderr
    assert "curl" not in run.stdout
