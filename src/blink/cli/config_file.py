# SPDX-License-Identifier: Apache-2.0
"""The YAML file of --config: its keys are flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from blink.errors import ConfigError
from blink.fields import one_line

_MAX_BYTES = 1 << 20


def read_words(name: str) -> list[str]:
    """Return the flags of a file as words of a command line.

    Raises:
        ConfigError: it cannot be read, or holds no flags.
    """
    try:
        with Path(name).expanduser().open("rb") as file:
            values = yaml.safe_load(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {name} cannot be read: {one_line(error)}") from error
    if values is None:
        return []
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"--config {name} must hold flags, such as `max-model-len: 4096`")
    words: list[str] = []
    for key, value in values.items():
        words += _write(f"--{key.lstrip('-')}", value)
    return words


def _write(flag: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [f"{flag}={_spell(item)}" for item in value]
    return [f"{flag}={_spell(value)}"]


def _spell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) or value is None else str(value)
