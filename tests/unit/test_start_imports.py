# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server load before they start others: each module there delays the first token."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from blink.cli.loading import check_there, load
from blink.errors import ConfigError


def loaded_with(module: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after it has imported one."""
    program = f"import blink.cli.main, {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["blink.cli.serve", "blink.cli.engine"])
def test_what_starts_an_engine_loads_nothing_that_takes_long(module: str) -> None:
    # The engine forks a child, for which numpy's threads would not do either.
    assert not loaded_with(module) & {"numpy", "asyncio", "torch", "tokenizers", "fastapi", "filelock"}


def test_modules_load_without_collections_and_collections_go_on_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()
    monkeypatch.setattr("blink.cli.loading.import_module", lambda _: seen.append(gc.isenabled()))
    load("anything")
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        load("anything")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_package_that_is_not_there_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    check_there("blink", "the engine")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"the engine needs torch, which is not installed: .*engine"):
        check_there("torch", "the engine")
