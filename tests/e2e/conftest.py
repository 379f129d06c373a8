# SPDX-License-Identifier: Apache-2.0
"""One real engine for the whole session, and real frontends in front of it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from blink.config import FrontendConfig
from blink.models.weights.files import default_model_path
from blink.text.assets import load_assets
from blink.text.tokenizer import Tokenizer
from processes import (
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    Engine,
    Frontend,
    answers,
    start_frontend,
    stop,
    wait_for,
)

_BOOT_SECONDS = 300.0  # on a machine that does much else


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A running CPU engine with the default model."""
    if not default_model_path().is_file():
        pytest.skip("the default model is not downloaded")
    name = f"e2e-{os.getpid()}-{secrets.token_hex(3)}"
    flags = [f"--region={name}", "--device=cpu", "--cpu-threads=1", f"--max-model-len={MAX_MODEL_LEN}"]
    flags += ["--num-queue-pairs=6", f"--max-sequences-per-worker={MAX_SEQUENCES}"]
    flags += ["--max-num-batched-tokens=512"]  # long prompts come in chunks, and buffers soon reach their size
    process = subprocess.Popen([sys.executable, "-m", "blink", "engine", *flags])
    try:
        frontend = start_frontend(name, wait=False)
        try:
            wait_for(lambda: answers(frontend) == 200, _BOOT_SECONDS)
        finally:
            stop(frontend.process)
        yield Engine(process, name)
    finally:
        stop(process)


@pytest.fixture(scope="session")
def region(engine: Engine) -> str:
    return engine.region


@pytest.fixture(scope="session")
def server(region: str) -> Iterator[Frontend]:
    """The frontend that most tests talk to."""
    frontend = start_frontend(region, f"--max-body-bytes={MAX_BODY_BYTES}", "--keep-alive-timeout=1")
    yield frontend
    stop(frontend.process)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_assets(FrontendConfig()).tokenizer
