# SPDX-License-Identifier: Apache-2.0
"""Clients, unmodified, in environments of their own, against a real server of a model whose replies are written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_environments import UnavailableError, prepare
from client_programs import FOLDER, PROGRAMS, RULES, Program
from parrot_server import serve_parrot
from processes import Frontend

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory."""
    return tmp_path_factory.mktemp("parrot")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Frontend]:
    """A server of a model that has the replies for all programs."""
    with serve_parrot(folder, RULES) as frontend:
        yield frontend


def command_of(program: Program, programs_folder: Path, folder: Path) -> list[str]:
    """Return the command line of a program; Node.js looks for packages in the folders above it."""
    file = FOLDER / program.file
    if program.file.endswith(".mjs"):
        return ["node", str(shutil.copy(file, programs_folder.parents[1]))]
    if program.file.endswith(".sh"):
        return ["bash", str(file), str(folder)]
    return [str(programs_folder / "python"), str(file)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_client_prints_what_the_model_says(program: Program, server: Frontend, folder: Path, tmp_path: Path) -> None:
    try:
        programs_folder = prepare(program)
    except UnavailableError as error:
        pytest.skip(str(error))
    environment = {
        "PATH": f"{programs_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM asks the network for it otherwise
    }
    command = command_of(program, programs_folder, folder)
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert Counter(program.prints) <= Counter(run.stdout.splitlines()), run.stdout + run.stderr
