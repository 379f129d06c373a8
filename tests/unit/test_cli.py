# SPDX-License-Identifier: Apache-2.0
"""The command line's promises: quick to import, one clear line for a mistake, exit status 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib import machinery, metadata
from pathlib import Path

import pytest

import blink
from blink.cli import main as cli
from blink.cli import versions

_HEAVY = ("torch", "triton", "cuda", "transformers")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blink", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _loaded_after(code: str, lines: int = 0) -> set[str]:
    """Names of all modules that a fresh interpreter holds after running `code`, which prints so many lines."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(run.stdout.split("\n", lines)[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "blink",
        "blink.cli.main",
        "blink.cli.serve",
        "blink.cli.chat",
        "blink.bench.sweep",
        "blink.cli.doctor",
        "blink.api",
        "blink.api.server",
    ],
)
def test_import_loads_nothing_heavy(module: str) -> None:
    loaded = _loaded_after(f"import {module}")
    assert module in loaded
    assert not loaded.intersection(_HEAVY)


def test_an_engine_loads_nothing_of_chats_or_grammars() -> None:
    """What the first token does not need: each millisecond of it is one until a server is ready."""
    loaded = _loaded_after("import blink.cli.main; blink.cli.main.parse(['engine']); import blink.engine.boot")
    assert "blink.engine.cpu" in loaded
    others = ("blink.text.message", "blink.text.assets", "blink.grammar", "blink.bench", "blink.quantize", "jinja2")
    assert not [name for name in loaded if name.startswith(others)]


def test_command_line_loads_the_flags_of_one_command() -> None:
    configs = {"blink.bench.config", "blink.quantize.config", "blink.view.config", "blink.cli.plan"}
    assert not configs & _loaded_after("import blink.cli.main; blink.cli.main.parse(['serve'])")
    loaded = _loaded_after("import blink.cli.main; blink.cli.main.parse(['bench'])")
    assert configs & loaded == {"blink.bench.config"}


def test_command_line_loads_no_third_party_package() -> None:
    loaded = _loaded_after("import blink.cli.main; blink.cli.main.parse(['top'])")
    packages = {name.partition(".")[0] for name in loaded - _loaded_after("")} - {"blink"}
    assert packages <= sys.stdlib_module_names


def test_version_is_the_package_version_and_torchs() -> None:
    first, second = _run("--version").stdout.splitlines()
    assert first == f"blink {blink.__version__}"
    assert second.startswith(f"torch {metadata.version('torch')}, ")


def test_version_loads_no_torch() -> None:
    code = "from blink.cli.main import main\ntry:\n    main(['--version'])\nexcept SystemExit:\n    pass"
    assert not _loaded_after(code, lines=2).intersection(_HEAVY)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("cuda: Optional[str] = '13.0'\ndebug = False", "for CUDA 13.0"),
        ("cuda = '12.8'", "for CUDA 12.8"),
        ("cuda: Optional[str] = None\nhip = '6.4'", "without CUDA"),
    ],
)
def test_version_tells_the_cuda_of_torch(
    build: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('loaded')")
    (tmp_path / "torch" / "version.py").write_text(build)
    found = machinery.PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr(versions, "find_spec", lambda _: found)
    assert versions.describe_versions().endswith(f", {said}")


def test_version_is_told_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", refuse)
    assert "torch is not installed" in versions.describe_versions()


def test_package_offers_its_public_names_lazily() -> None:
    from blink.sampling_params import SamplingParams

    assert blink.SamplingParams is SamplingParams
    assert set(blink.__all__) <= set(dir(blink))
    with pytest.raises(AttributeError, match="no_such_name"):
        blink.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "command", ["serve", "engine", "frontend", "chat", "bench", "doctor", "quickstart", "completion"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: blink {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["serve", "--port", "eight"], "--port"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-num", "3"], "--max-num"),
        (["serve", "--frontend-workers", "0"], "--frontend-workers"),
        (["serve", "--frontend-workers", "2", "--uds", "blink.sock"], "--uds"),
        (["serve", "--exit-after-sample"], "--sample-prompt"),
        (["serve", "--sample-prompt", "hi", "--uds", "blink.sock"], "--uds"),
        (["serve", "no/such/model.gguf", "--port", "0"], "no/such/model.gguf"),
        (["chat", "--url", "localhost:8000"], "--url"),
        (["completion", "csh"], "csh"),
    ],
)
def test_mistake_gives_one_line_and_status_2(arguments: list[str], word: str) -> None:
    run = _run(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("blink: error: ")
    assert word in line


def test_serve_refuses_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = _run("serve", "--port", str(port))
    assert run.returncode == 2
    assert f"port {port} is in use" in run.stderr


def test_chat_without_a_server_says_how_to_start_one() -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        run = _run("chat", "--url", f"http://127.0.0.1:{bound.getsockname()[1]}", "--once", "hi")
    assert run.returncode == 2
    assert "blink serve" in run.stderr
    assert "Traceback" not in run.stderr
