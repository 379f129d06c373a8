# SPDX-License-Identifier: Apache-2.0
"""Read a model's small files, text or JSON, whose size nobody has vouched for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blink.errors import ConfigError

# The index of a model of 100,000 tensors is a third of it.
_MAX_BYTES = 32 << 20


def read_text(path: Path, max_bytes: int = _MAX_BYTES) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read, is no UTF-8, or is too large.
    """
    check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def check_size(path: Path, max_bytes: int) -> None:
    """Refuse what is no ordinary file, which might never end, or a large one.

    Raises:
        ConfigError: as above.
    """
    try:
        # Nothing else has a size: reading a pipe would wait for ever.
        size = path.stat().st_size if path.is_file() else -1
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if size < 0:
        raise ConfigError(f"{path} is missing or no ordinary file.")
    if size > max_bytes:
        raise ConfigError(f"{path} has {size} bytes, more than the {max_bytes} that such a file may have.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: it cannot be read or holds something else.
    """
    try:
        values = json.loads(read_text(path))
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values
