# SPDX-License-Identifier: Apache-2.0
"""What a model path holds: which format, and the ModelSpec in it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.config import CHECKPOINT_METHODS
from blink.errors import ConfigError
from blink.fields import show
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import read_gguf_spec
from blink.models.weights.text_files import read_json


def check_method(path: Path, name: str) -> None:
    """Refuse a name of a checkpoint's quantisation (--quantization) that is not that of the files.

    Raises:
        ConfigError: it is another, or the files are not quantised.
    """
    wanted = CHECKPOINT_METHODS.get(name)
    if wanted is None:
        return
    config = {} if path.is_file() else read_json(path / "config.json").get("quantization_config") or {}
    found = config.get("quant_method") if isinstance(config, dict) else None
    if found != wanted:
        said = f"says {show(found)}" if found else "has no quantisation"
        raise ConfigError(f"--quantization {name}: {path} {said}; leave it out, or take a checkpoint of {wanted}.")


def find_format(path: Path, load_format: str = "auto") -> str:
    """Return "safetensors", "gguf" or "dummy": the load format asked for, or for "auto" the one that the path holds.

    Raises:
        ConfigError: the path does not hold weights of that format.
    """
    found = "gguf" if path.is_file() else "safetensors" if any(path.glob("*.safetensors")) else "none"
    if load_format == "dummy" or load_format == found:
        return load_format
    if load_format != "auto":
        raise ConfigError(f"{path} holds no {load_format} weights (found: {found}); change --load-format or MODEL.")
    if found == "none":
        raise ConfigError(
            f"{path} holds no *.safetensors files."
            " Give a directory that does, or a .gguf file, or use --load-format dummy."
        )
    return found


def read_spec(path: Path, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """Describe the model in a .gguf file or a Hugging Face directory, parts of whose config.json `changes` replace.

    Raises:
        ConfigError: the description is missing or malformed, or Blink does not run this model.
    """
    if changes and path.is_file():
        raise ConfigError(f"--hf-overrides: {path} has no config.json; leave it out.")
    spec = read_gguf_spec(GgufFile(path)) if path.is_file() else read_config_json(path, changes)
    spec.check(str(path))
    return spec
