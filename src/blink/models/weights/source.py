# SPDX-License-Identifier: Apache-2.0
"""What a model path holds: which format, and the ModelSpec in it. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from blink.errors import ConfigError
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import read_gguf_spec


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


def read_spec(path: Path) -> ModelSpec:
    """Describe the model in a .gguf file or a Hugging Face directory.

    Raises:
        ConfigError: the description is missing or malformed, or Blink does not run this model.
    """
    spec = read_gguf_spec(GgufFile(path)) if path.is_file() else read_config_json(path)
    spec.check(str(path))
    return spec
