# SPDX-License-Identifier: Apache-2.0
"""One real engine for the whole session, and real frontends in front of it."""

from __future__ import annotations

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
    run_engine,
    start_frontend,
    stop,
)
from tiny_model import write_tiny_model

# Long prompts come in chunks, and buffers soon reach their size.
_SIZES = ["--num-queue-pairs=6", f"--max-sequences-per-worker={MAX_SEQUENCES}", "--max-num-batched-tokens=512"]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A running CPU engine with the default model."""
    if not default_model_path().is_file():
        pytest.skip("the default model is not downloaded")
    with run_engine(*_SIZES, f"--max-model-len={MAX_MODEL_LEN}") as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running CPU engine whose tokens mean nothing and come within some milliseconds."""
    if not default_model_path().is_file():
        pytest.skip("the default model, whose vocabulary it has, is not downloaded")
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = ["--load-format=dummy", f"--max-model-len={MAX_MODEL_LEN}", "--num-gpu-blocks-override=4096"]
    flags.append(f"--tokenizer={default_model_path()}")
    with run_engine(str(folder), *_SIZES, *flags, "--served-model-name=tiny") as engine:
        yield engine


@pytest.fixture(scope="session")
def region(engine: Engine) -> str:
    return engine.region


@pytest.fixture(scope="session")
def default_server(region: str) -> Iterator[Frontend]:
    """A frontend of the default model."""
    frontend = start_frontend(region, f"--max-body-bytes={MAX_BODY_BYTES}")
    yield frontend
    stop(frontend.process)


@pytest.fixture(scope="session")
def server(default_server: Frontend) -> Frontend:
    """The frontend that most tests talk to."""
    return default_server


@pytest.fixture(scope="session")
def tiny_server(tiny_engine: Engine) -> Iterator[Frontend]:
    """A frontend of the engine whose tokens mean nothing; they are as good as any where answers are compared."""
    frontend = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}")
    yield frontend
    stop(frontend.process)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_assets(FrontendConfig()).tokenizer
