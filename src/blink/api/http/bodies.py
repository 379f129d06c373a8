# SPDX-License-Identifier: Apache-2.0
"""Takes the bodies of requests off their connections, within one budget of memory for all of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fastapi import Request
from starlette.requests import ClientDisconnect

from blink.api.http.headers import header_of
from blink.api.http.http1 import writer_of
from blink.errors import BadRequestError, ClientGoneError, OverloadedError

JSON: Final = "application/json"
_SMALL_BYTES = 8 << 10  # these do not give way to others


class _Held:
    """A body in memory."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.data = bytearray()
        self.num_bytes = 0
        self.is_complete = False
        self.is_evicted = False


class Bodies:
    """Hold the bodies that are on their way or being read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: set[_Held] = set()
        self._num_bytes = 0

    @asynccontextmanager
    async def take(self, request: Request) -> AsyncIterator[bytearray]:
        """Give a request's body for as long as the block takes; its bytes may be cleared earlier.

        Raises:
            OverloadedError: the bodies of this worker fill its budget, and this one is the largest.
            ClientGoneError: nobody waits for an answer.
        """
        held = _Held(request)
        self._held.add(held)
        try:
            async for part in request.stream():
                held.data += part
                held.num_bytes += len(part)
                self._num_bytes += len(part)
                self._make_room(held)
            held.is_complete = True
            yield held.data
        except ClientDisconnect:
            raise _no_room() if held.is_evicted else ClientGoneError from None
        finally:
            self._held.discard(held)
            self._num_bytes -= held.num_bytes

    def _make_room(self, newest: _Held) -> None:
        """End the largest bodies, so that small ones pass however many large ones are on their way."""
        over = self._num_bytes - self._max_bytes
        while over > 0 and newest.num_bytes > _SMALL_BYTES:
            candidates = [held for held in self._held if not held.is_complete and not held.is_evicted]
            largest = max(candidates, key=lambda held: held.num_bytes, default=newest)
            if largest.num_bytes <= newest.num_bytes:
                raise _no_room()
            largest.is_evicted = True
            over -= largest.num_bytes
            largest.data.clear()
            writer_of(largest.request.scope).abort()


def _no_room() -> OverloadedError:
    return OverloadedError("The bodies of requests fill this server's memory for them. Retry later.")


def check_content_type(request: Request, allowed_origins: Sequence[str], wanted: str = JSON) -> None:
    """Refuse what is not of the wanted type, and what a foreign page may send from a browser without asking.

    wanted: one that a browser asks for before it sends it elsewhere.

    Raises:
        BadRequestError: as in vLLM.
    """
    kind = header_of(request.scope, b"content-type").partition(";")[0].strip().lower()
    if kind == wanted or (wanted == JSON and kind.startswith("application/") and kind.endswith("+json")):
        return
    origin = request.headers.get("origin")
    is_foreign = origin is not None and origin not in allowed_origins and "*" not in allowed_origins
    if kind or is_foreign:
        raise BadRequestError(f"Unsupported Media Type: Only '{wanted}' is allowed")
