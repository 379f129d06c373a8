# SPDX-License-Identifier: Apache-2.0
"""TAB completes what the parsers declare: a real bash asks a real `blink`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from blink.cli.completion import SHELLS
from blink.cli.main import COMMANDS, main

# What readline would do, for the last word of a line.
_ASK = """
eval "$(blink completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete blink 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a command `blink`, which runs this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "blink").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m blink "$@"\n')
    (folder / "blink").chmod(0o755)
    return folder


def _complete(folder: Path, line: str) -> list[str]:
    run = subprocess.run(
        ["bash", "--norc", "-c", _ASK, "bash", line],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [word.strip() for word in run.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("blink ", {*COMMANDS}),
        ("blink qua", {"quantize"}),
        ("blink serve --kv-cache-d", {"--kv-cache-dtype"}),
        ("blink completion ", {*SHELLS}),
        ("blink serve --scheduling-policy pri", {"priority"}),
    ],
)
def test_bash_completes(folder: Path, line: str, words: set[str]) -> None:
    assert words <= {*_complete(folder, line)}


def test_bash_completes_flags_only_of_the_command(folder: Path) -> None:
    assert "--sample-prompt" in _complete(folder, "blink serve --s")
    assert "--sample-prompt" not in _complete(folder, "blink chat --s")


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --command blink")]
)
def test_each_shell_has_a_script(shell: str, sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert sign in capsys.readouterr().out
