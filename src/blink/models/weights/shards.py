# SPDX-License-Identifier: Apache-2.0
"""Find the safetensors files of a model directory, and nothing outside of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from blink.errors import ConfigError
from blink.fields import one_line, show
from blink.models.weights.text_files import find_inside, read_json

# Of the output layer, which older files of models that see pictures keep with their text part.
OUTPUT_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


def list_shards(directory: Path) -> list[Path]:
    """Return the files with weights: those that the index names, or all where there is no index.

    Raises:
        ConfigError: the index is malformed, or a file is missing or lies elsewhere.
    """
    index = directory / "model.safetensors.index.json"
    paths = read_index(index) if index.exists() else sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}, which its index names; download the model again.")
    for path in paths:
        find_inside(path)
    return paths


def read_index(index: Path) -> list[Path]:
    """Return the files that an index names, all of them beside it.

    Raises:
        ConfigError: the index is malformed.
    """
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ConfigError(f"{index} is malformed ('weight_map' must name a file for each tensor); download it again.")
    names = sorted(set(weights.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ConfigError(
                f"{index} is malformed ({show(name)} is no safetensors file beside it); download it again."
            )
    return [index.parent / name for name in names]


def has_tensor(directory: Path, names: Iterable[str]) -> bool:
    """Return whether a directory's files have a tensor of one of some names.

    Raises:
        ConfigError: a file cannot be read.
    """
    wanted = {*names}
    return any(not wanted.isdisjoint(_list_names(path)) for path in list_shards(directory))


def _list_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except Exception as error:  # the library's error type is not public
        raise ConfigError(f"{path} is not a readable safetensors file ({one_line(error)}).") from error
