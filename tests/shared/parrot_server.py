# SPDX-License-Identifier: Apache-2.0
"""A real engine and frontend of a parrot: clients of any kind talk to it, and it says what a test has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from parrot_model import MAX_MODEL_LEN, Rule, write_parrot_model
from processes import Frontend, run_engine, start_frontend, stop

_KV_CACHE_BYTES = 256 << 20


@contextmanager
def serve_parrot(folder: Path, rules: Sequence[Rule]) -> Iterator[Frontend]:
    """Write a parrot into a folder and serve it on loopback, under the name "parrot"."""
    write_parrot_model(folder, rules)
    sizes = [f"--max-model-len={MAX_MODEL_LEN}", f"--kv-cache-memory-bytes={_KV_CACHE_BYTES}"]
    with run_engine(str(folder), *sizes, "--served-model-name=parrot") as engine:
        frontend = start_frontend(engine.region, str(folder))
        try:
            yield frontend
        finally:
            stop(frontend.process)
