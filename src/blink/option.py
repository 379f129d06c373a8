# SPDX-License-Identifier: Apache-2.0
"""How fields of configurations are declared and checked."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Any

from blink.errors import ConfigError


def option(default: Any, text: str, **extra: Any) -> Any:
    """Declare a field with its help text.

    `extra` may hold `choices`, `metavar`, `flag` or `words` for the command line; words: numbers by their names.
    """
    return field(default=default, metadata={"help": text, **extra})


def require(config: object, names: str, low: float, high: float = float("inf")) -> None:
    """Refuse a value outside of [low, high] of any of these fields with a `ConfigError` that names its flag."""
    for name in names.split():
        value = getattr(config, name)
        if not low <= value <= high:
            flag = name.replace("_", "-")
            rule = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            raise ConfigError(f"--{flag} must be {rule}, got {value:g}")


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a field holds; an empty text is an empty one.

    Raises:
        ConfigError: it is something else; the message names the field's flag.
    """
    flag = f"--{name.replace('_', '-')}"
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text}")
    return values
