# SPDX-License-Identifier: Apache-2.0
"""What a model path holds: which format, and the ModelSpec in it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import read_gguf_spec
from blink.models.weights.text_files import read_json


def check_method(path: Path, name: str) -> None:
    """Refuse a method of quantisation (--quantization) other than Blink's own and that of the files.

    Raises:
        ConfigError: it is another, or the files are not quantised.
    """
    if name in ("auto", "fp8"):
        return
    file = path / "config.json"
    config = Fields({} if path.is_file() else read_json(file), str(file))
    method = Fields(config.mapping("quantization_config"), str(file)).text("quant_method", "")
    if method != name:
        said = f"{path} is quantised by {show(method)}" if method else f"{path} names no method"
        raise ConfigError(f"--quantization {name}: {said}; leave it out.")


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
