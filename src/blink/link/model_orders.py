# SPDX-License-Identifier: Apache-2.0
"""Orders to an engine's host process about its model: to sleep, to wake up, to take other weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blink.errors import BadRequestError
from blink.region.engine_socket import ask_engine, socket_path

SOCKET: Final = "model"
TAGS: Final = ("weights", "kv_cache")
LEVELS: Final = (1, 2)
_SECONDS = 3600.0  # weights of any size are read within them


def check_obeys(region: str) -> None:
    """Refuse orders to an engine that takes none.

    Raises:
        BadRequestError: it takes none.
    """
    if not socket_path(region, SOCKET).exists():
        raise BadRequestError(
            "This engine neither sleeps nor takes other weights yet: only one on a CPU does, for frontends of its "
            "host (docs/pause.md)."
        )


def check_level(level: int) -> None:
    """Refuse a level of sleep that is none.

    Raises:
        BadRequestError: it is none.
    """
    if level not in LEVELS:
        raise BadRequestError(f"level must be 1 (the KV cache is freed) or 2 (weights too), got {level}.", "level")


def check_tags(tags: Sequence[str] | None) -> list[str]:
    """Return what is to wake up; without tags everything.

    Raises:
        BadRequestError: a tag is unknown.
    """
    if unknown := [tag for tag in tags or () if tag not in TAGS]:
        raise BadRequestError(f"tags are {' and '.join(TAGS)}, got {unknown[0]!r}.", "tags")
    return list(tags or TAGS)


def ask_sleep(region: str, level: int) -> None:
    """Let an engine free memory; it is paused, and running sequences lose their KV cache.

    Raises:
        BadRequestError: this engine cannot.
        EngineUnavailableError: no engine answers.
    """
    ask_engine(region, SOCKET, {"sleep": level}, _SECONDS)


def ask_wake_up(region: str, tags: Sequence[str]) -> bool:
    """Let an engine take memory back; return whether it is wide awake.

    Raises:
        BadRequestError: there is no memory, or the weights cannot be read again.
        EngineUnavailableError: no engine answers.
    """
    return bool(ask_engine(region, SOCKET, {"wake_up": list(tags)}, _SECONDS)["awake"])


def ask_update(region: str, path: str, load_format: str, *, clears_cache: bool) -> None:
    """Let an engine read other weights of the same model from a folder or file.

    Raises:
        BadRequestError: they do not fit, and the engine's are as they were; or reading them failed, and the engine's
            are undefined.
        EngineUnavailableError: no engine answers.
    """
    question = {"update": path, "load_format": load_format, "clears_cache": clears_cache}
    ask_engine(region, SOCKET, question, _SECONDS)
