# SPDX-License-Identifier: Apache-2.0
"""The wheel that `make wheel` makes: what is in it, and that it serves from an environment without this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from blink import LLM, SamplingParams
from ports import free_port
from processes import stop, wait_for
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,  # it compiles the library once more
    pytest.mark.skipif(
        not find_spec("scikit_build_core") or not find_spec("auditwheel"),
        reason="needs the build tools that `make test` installs",
    ),
]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "src" / "blink"
_SITE = [folder for folder in sys.path if folder.endswith("site-packages")]  # of this environment
_PROMPT = [5, 17, 23, 99, 250]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for this machine."""
    from scikit_build_core.build import build_wheel

    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(_ROOT)
        return folder / build_wheel(str(folder), {"build-dir": str(folder / "build")})


@pytest.fixture(scope="module")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for any Linux with the same C library, as `make wheel` makes it."""
    folder = tmp_path_factory.mktemp("repaired")
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude=libibverbs.so.1", f"--wheel-dir={folder}"]
    path = os.pathsep.join([*(str(Path(folder).parents[2] / "bin") for folder in _SITE), os.environ["PATH"]])
    run = subprocess.run(
        [*command, str(built)], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    [repaired] = folder.iterdir()
    return repaired


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    target = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", f"--python={python}", "install"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    (target / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in _SITE))
    return python


def test_wheel_carries_the_library_its_sources_and_the_model_shapes(built: Path) -> None:
    assert re.fullmatch(r"blink_serve-[\d.]+-py3-none-linux_\w+\.whl", built.name)
    sources = {
        str(path.relative_to(_ROOT / "src"))
        for path in _PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "lib"
    }
    assert _members(built) == sources | {"blink/lib/libblink.so"}


def test_repaired_wheel_fits_any_linux_of_its_age_and_brings_no_library_along(built: Path, wheel: Path) -> None:
    assert re.fullmatch(r"blink_serve-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert _members(wheel) == _members(built)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".libs/" in name]


def test_installed_wheel_serves_what_the_checkout_computes(python: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    where = subprocess.run([python, "-c", "import blink; print(blink.__file__)"], capture_output=True, text=True)
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1])
    with LLM(str(model), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        [expected] = llm.generate([_PROMPT], greedy)
    port = free_port()
    flags = [f"--port={port}", "--load-format=dummy", "--skip-tokenizer-init", "--kv-cache-memory-bytes=16M"]
    command = [python.with_name("blink"), "serve", model, *flags, "--device=cpu", "--enable-log-requests"]
    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=_bare_environment(), stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
                wait_for(lambda: _is_ready(http, server), 200)
                body = {"prompt": _PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
                answer = http.post("/v1/completions", json={**body, "return_token_ids": True})
        finally:
            stop(server)
        log.seek(0)
        said = log.read()
    assert answer.json()["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    assert f"{len(_PROMPT)} prompt tokens" in said and "'max_tokens': 12" in said  # --enable-log-requests
    assert str(_PROMPT) not in said


def _members(wheel: Path) -> set[str]:
    """Return the package's files in a wheel, without the RDMA library, which only some machines can build."""
    names = zipfile.ZipFile(wheel).namelist()
    own = {name for name in names if name.startswith("blink/") and not name.endswith("/")}
    return own - {"blink/lib/libblink_verbs.so"}


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BLINK"))}


def _is_ready(http: httpx.Client, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server died"
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
