# SPDX-License-Identifier: Apache-2.0
"""What requests are sampled with that say nothing: of generation_config.json, and what replaces parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.config import ModelConfig, parse_object
from blink.errors import BadRequestError, ConfigError
from blink.models.weights.files import DEFAULT_SAMPLING, default_model_path
from blink.models.weights.text_files import read_json
from blink.sampling_params import SamplingParams
from blink.sampling_ranges import SAMPLING_RANGES

_FILE = "generation_config.json"
_MOST_TOKENS = "max_new_tokens"  # the most that any request gets: its max_tokens
# What may be set: as in vLLM, not the penalties that only requests have.
_NAMES = (SAMPLING_RANGES.keys() - {"presence_penalty", "frequency_penalty"}) | {_MOST_TOKENS}


def read_default_sampling(root: Path, config: ModelConfig) -> dict[str, float | int]:
    """Return default sampling parameters by the names of SamplingParams; those of `max_tokens` bound requests, too.

    Raises:
        ConfigError: a file or --override-generation-config is malformed, or a folder has no such file.
    """
    changes = parse_object("override_generation_config", config.override_generation_config)
    if unknown := changes.keys() - _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise ConfigError(f"--override-generation-config: {min(unknown)} is not supported; known: {known}")
    return _read_source(root, config.generation_config) | _check(changes, "--override-generation-config")


def _read_source(root: Path, source: str) -> dict[str, float | int]:
    """Return what --generation-config names: the model's own file, none, or that of a folder."""
    if source == "vllm":
        return {}
    if source != "auto":
        path = Path(source).expanduser() / _FILE
        if not path.is_file():
            raise ConfigError(f"--generation-config {source} is no folder with {_FILE}.")
        return _check(read_json(path), str(path))
    if root == default_model_path():
        return dict(DEFAULT_SAMPLING)
    path = root / _FILE
    return _check(read_json(path), str(path)) if root.is_dir() and path.is_file() else {}


def _check(config: Mapping[str, Any], place: str) -> dict[str, float | int]:
    found = {name: config[name] for name in _NAMES if config.get(name) is not None}
    if _MOST_TOKENS in found:
        found["max_tokens"] = found.pop(_MOST_TOKENS)
    try:
        SamplingParams(**dict[str, Any](found))
        if found.get("max_tokens", 1) < 1:
            raise BadRequestError(f"{_MOST_TOKENS} must be at least 1.")
    except (BadRequestError, TypeError, OverflowError) as error:
        raise ConfigError(f"{place} is malformed: {error}") from error
    return found
