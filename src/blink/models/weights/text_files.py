# SPDX-License-Identifier: Apache-2.0
"""Read the files of a model's directory, whose size nobody has vouched for, and nothing outside of it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields

# The index of a model of 100,000 tensors is a third of it.
_MAX_BYTES = 32 << 20
# What a model's directory may have beside config.json and weights, and where its other chat templates are.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_text(path: Path, max_bytes: int = _MAX_BYTES, *, root: Path | None = None) -> str:
    """Return the text of a file of a model's directory, as read_file() reads it.

    Raises:
        ConfigError: it cannot be read, is no UTF-8, is too large, or is a link out of the directory.
    """
    return _decode(read_file(path, max_bytes, root=root), path)


def read_named_text(path: Path, max_bytes: int = _MAX_BYTES) -> str:
    """Return the text of a file that the user has named: it may lie anywhere.

    Raises:
        ConfigError: it cannot be read, is no UTF-8, or is too large.
    """
    return _decode(_read(_resolve(path), path, max_bytes), path)


def read_file(path: Path, max_bytes: int, *, root: Path | None = None) -> bytes:
    """Return what is in a file of a model's directory, which is `root`, or else the file's own folder.

    Raises:
        ConfigError: it cannot be read, is too large, or is a link out of the directory.
    """
    return _read(find_inside(path, root), path, max_bytes)


def find_inside(path: Path, root: Path | None = None) -> Path:
    """Return the file itself that stands at a path in a model's directory: a link must not lead out of it.

    The snapshots of a Hugging Face cache are links to its blobs.

    Raises:
        ConfigError: it does.
    """
    directory, found = _resolve(root or path.parent), _resolve(path)
    is_blob = directory.parent.name == "snapshots" and found.parent == (directory.parent.parent / "blobs").resolve()
    if not is_blob and not found.is_relative_to(directory):
        raise ConfigError(f"{path} is a link out of the model's directory; put the file itself there.")
    return found


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a name that no file can have
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read(found: Path, path: Path, max_bytes: int) -> bytes:
    """Return what is in the file `found`, which the user knows by `path`: never what might have no end."""
    try:
        # Opening a pipe would wait for ever; a link that has come since is not followed.
        fd = os.open(found, _FLAGS)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is missing or no ordinary file.")
            if status.st_size > max_bytes:
                raise ConfigError(
                    f"{path} has {status.st_size} bytes, more than the {max_bytes} that such a file may have."
                )
            return file.read(max_bytes)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing or no ordinary file.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_json(path: Path, *, root: Path | None = None) -> dict[str, Any]:
    """Return the object in a JSON file of a model's directory.

    Raises:
        ConfigError: it cannot be read, is a link out of the directory, or holds something else.
    """
    values = _parse(path, read_text(path, root=root))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values


def read_list(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of the list in a JSON file of a model's directory.

    Raises:
        ConfigError: it cannot be read, is a link out of the directory, or holds something else.
    """
    return Fields({path.stem: _parse(path, read_text(path))}, str(path)).mappings(path.stem)


def _parse(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
