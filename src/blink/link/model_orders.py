# SPDX-License-Identifier: Apache-2.0
"""Orders to an engine's host process about its model: to sleep, to wake up, to take other weights.

Weights come from files, or tensor by tensor: in parts that are kept aside, and then are loaded as one update.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Final

from blink.errors import BadRequestError
from blink.region.engine_socket import ask_engine, socket_path, stream_to_engine

SOCKET: Final = "model"
TAGS: Final = ("weights", "kv_cache")
LEVELS: Final = (1, 2)
_RECEIVE: Final = {"order": "receive", "values": {}}
_SECONDS = 3600.0  # weights of any size are read within them


def check_obeys(region: str) -> None:
    """Refuse orders to an engine that takes none.

    Raises:
        BadRequestError: it takes none.
    """
    if not socket_path(region, SOCKET).exists():
        raise BadRequestError(
            "This engine neither sleeps nor takes other weights yet. docs/pause.md says which engines do, for "
            "frontends on their host."
        )


def check_sleeps(region: str) -> None:
    """Refuse sleep to an engine that cannot, before it is paused.

    Raises:
        BadRequestError: it cannot.
        EngineUnavailableError: no engine answers.
    """
    check_obeys(region)
    _order(region, "check_sleep")


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
    _order(region, "sleep", level=level)


def ask_wake_up(region: str, tags: Sequence[str]) -> bool:
    """Let an engine take memory back; return whether it is wide awake.

    Raises:
        BadRequestError: there is no memory, or the weights cannot be read again.
        EngineUnavailableError: no engine answers.
    """
    return bool(_order(region, "wake_up", tags=list(tags))["awake"])


def ask_update(region: str, path: str, load_format: str, *, clears_cache: bool) -> None:
    """Let an engine read other weights of the same model from a folder or file.

    Raises:
        BadRequestError: they do not fit, and the engine's are as they were; or reading them failed, and the engine's
            are undefined.
        EngineUnavailableError: no engine answers.
    """
    _order(region, "update", path=path, load_format=load_format, clears_cache=clears_cache)


def ask_begin(region: str) -> None:
    """Let the tensors that come be parts of one update, until ask_commit().

    Raises:
        EngineUnavailableError: no engine answers.
    """
    _order(region, "begin")


def ask_commit(region: str, *, clears_cache: bool) -> None:
    """Let an engine load the tensors that have come.

    Raises:
        BadRequestError: none have, and the weights are as they were; or loading failed, and they are undefined.
        EngineUnavailableError: no engine answers.
    """
    _order(region, "commit", clears_cache=clears_cache)


def ask_join(region: str, name: str, address: str, port: int, rank: int, size: int, backend: str = "") -> None:
    """Let an engine join the group of processes in which a trainer broadcasts; returns when all ranks have.

    backend: gloo or nccl; empty: that of the engine's device.

    Raises:
        BadRequestError: it cannot be joined.
        EngineUnavailableError: no engine answers.
    """
    _order(region, "join", name=name, address=address, port=port, rank=rank, size=size, backend=backend)


def ask_leave(region: str, name: str) -> None:
    """Let an engine leave a group.

    Raises:
        EngineUnavailableError: no engine answers.
    """
    _order(region, "leave", name=name)


def ask_broadcast(region: str, group: str, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> bool:
    """Let an engine take tensors that rank 0 of a group broadcasts; return whether further parts are to come.

    tensors: name, type as safetensors calls it, and shape of each, in the order in which they come.

    Raises:
        BadRequestError: they do not fit the model, or do not come; nothing of them is kept.
        EngineUnavailableError: no engine answers.
    """
    return bool(_order(region, "broadcast", group=group, tensors=tensors)["is_open"])


def ask_share(
    region: str, tensors: Sequence[tuple[str, str, Sequence[int]]], handles: Sequence[Mapping[str, Any]]
) -> bool:
    """Let an engine take tensors from another process's memory of its GPU; return whether further parts are to come.

    handles: of each tensor, by GPU; tensors: as ask_broadcast() has them.

    Raises:
        BadRequestError: they do not fit the model, or lie elsewhere; nothing of them is kept.
        EngineUnavailableError: no engine answers.
    """
    return bool(_order(region, "share", tensors=tensors, handles=handles)["is_open"])


def send_tensors(region: str, parts: Iterable[bytes]) -> bool:
    """Send an engine a stream of safetensors; return whether further parts of the update are to come.

    Raises:
        BadRequestError: it is malformed, does not fit the model, or ends early; nothing of it is kept.
        EngineUnavailableError: no engine answers.
    """
    return bool(ask_engine(region, SOCKET, _RECEIVE, _SECONDS, parts)["is_open"])


async def pass_tensors(region: str, parts: AsyncIterable[bytes]) -> bool:
    """Do what send_tensors() does with parts that come on an event loop.

    Raises:
        BadRequestError: as there.
        EngineUnavailableError: no engine answers.
    """
    return bool((await stream_to_engine(region, SOCKET, _RECEIVE, _SECONDS, parts))["is_open"])


def _order(region: str, order: str, **values: Any) -> dict[str, Any]:
    return ask_engine(region, SOCKET, {"order": order, "values": values}, _SECONDS)
