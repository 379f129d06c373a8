# SPDX-License-Identifier: Apache-2.0
"""What frontends and an engine's host process say to each other about adapters: a line of JSON each, over a socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, OverloadedError
from blink.region.files import region_path

MAX_LINE = 64 << 10
_ERRORS: dict[str, type[BlinkError]] = {
    error.__name__: error for error in (BadRequestError, OverloadedError, EngineUnavailableError)
}
_WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter in an engine's memory, by the index and generation that the region's words have."""

    index: int
    generation: int
    content: str  # hexadecimal digest of all that its results depend on


def socket_path(region: str) -> Path:
    """Return where an engine listens; '~' is in no region's name."""
    path = region_path(region)
    return path.with_name(f"{path.name}~adapters")


def ask_load(region: str, path: str, replaced: Held | None = None) -> Held:
    """Let an engine load an adapter; blocks until it is there.

    Raises:
        BadRequestError: the adapter is damaged, does not fit the model or asks for what is not done here.
        OverloadedError: sequences use all adapters that are there.
        EngineUnavailableError: no engine answers.
    """
    answer = _ask(region, {"load": path, "replaced": None if replaced is None else asdict(replaced)})
    return Held(**answer["held"])


def ask_unload(region: str, held: Held) -> None:
    """Let no further sequence use an adapter.

    Raises:
        EngineUnavailableError: no engine answers.
    """
    _ask(region, {"unload": asdict(held)})


def describe_error(error: BlinkError) -> dict[str, Any]:
    """Return the answer that _ask() raises as the same error."""
    return {"error": error.message, "param": error.param, "type": type(error).__name__}


def _ask(region: str, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_WAIT_SECONDS)
            connection.connect(str(socket_path(region)))
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline(MAX_LINE))
    except (OSError, ValueError) as error:
        raise EngineUnavailableError("Not available: the engine does not answer about adapters.") from error
    if "error" in answer:
        raise _ERRORS.get(answer["type"], EngineUnavailableError)(answer["error"], answer["param"])
    return answer
