# SPDX-License-Identifier: Apache-2.0
"""What stands before the routes: names of the host, API keys, the limit of bodies, request ids.

Plain ASGI: nothing per chunk.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from http import HTTPStatus

from fastapi import Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blink.api.http.clients import note_admin, note_key
from blink.api.http.errors import WriterOf, error_json, refuse
from blink.api.http.headers import header_of

_UNAUTHORIZED = b'{"error":"Unauthorized"}'  # OpenAI's API, as vLLM has it
_WRONG_KEY = "The API key, as Authorization: Bearer KEY or x-api-key: KEY, is missing or wrong."
_MAX_HOST_CHARS = 64


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server, and what each kind opens; an admin key opens all.

    guarded: beginnings of the paths that need a key, if there are API keys. admin_paths: whole paths that need an admin
    key, if there are admin keys.
    """

    api: Sequence[str]
    guarded: tuple[str, ...]
    admin: Sequence[str] = ()
    admin_paths: tuple[str, ...] = ()


class ApiKeyGuard:
    """Refuse requests that ask for work, cost others or change the server, without one of the keys for that."""

    def __init__(self, app: ASGIApp, keys: Keys, writer_of: WriterOf) -> None:
        self._app = app
        self._guarded = keys.guarded if keys.api else ()
        self._admin_paths = frozenset(keys.admin_paths if keys.admin else ())
        self._writer_of = writer_of
        self._api, self._admin = ([sha256(key.encode()).digest() for key in kind] for kind in (keys.api, keys.admin))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 401."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        write = self._writer_of(scope["path"])
        response = refuse(HTTPStatus.UNAUTHORIZED, _WRONG_KEY, write)
        if write is error_json:
            response = Response(_UNAUTHORIZED, HTTPStatus.UNAUTHORIZED, media_type="application/json")
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path, needs_admin = scope["path"], scope["path"] in self._admin_paths
        if not needs_admin and not path.startswith(self._guarded):
            return True
        scheme, _, key = header_of(scope, b"authorization").partition(" ")
        given = [key] if scheme.lower() == "bearer" else []
        digests = [*map(_digest_of, [*given, header_of(scope, b"x-api-key")])]
        admin = _find_known(digests, self._admin)
        digest = admin or (None if needs_admin else _find_known(digests, self._api))
        if admin is not None:
            note_admin(scope)
        if digest is not None:
            note_key(scope, digest)
        return digest is not None


def _find_known(digests: Sequence[bytes], known: Sequence[bytes]) -> bytes | None:
    """Return the first digest that is known; each is compared with all known ones, in constant time."""
    for digest in digests:
        matches = [secrets.compare_digest(digest, one) for one in known]
        if any(matches):
            return digest
    return None


def _digest_of(key: str) -> bytes:
    """Return the digest of a header's key, which arrives as latin-1: what the client sent is compared."""
    return sha256(key.strip().encode("latin-1")).digest()


class BodyLimit:
    """Refuse bodies that are too large, before and while they are read."""

    def __init__(self, app: ASGIApp, max_bytes: int, writer_of: WriterOf, free: Sequence[str] = ()) -> None:
        """free: paths whose bodies are not limited, as nothing holds them."""
        self._app = app
        self._writer_of = writer_of
        self._free = frozenset(free)
        self._max_bytes = max_bytes
        self._message = f"The request body is larger than {max_bytes} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a counting receiver, or answer 413."""
        if scope["type"] != "http" or scope["path"] in self._free:
            await self._app(scope, receive, send)
            return
        length = header_of(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_bytes:
            write = self._writer_of(scope["path"])
            await refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message, write)(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message)
            return message

        await self._app(scope, receive_counted, send)


class HostGuard:
    """Refuse requests under a foreign name, by which a page elsewhere reaches this host through its visitor's browser.

    A browser takes such a page for the server's own (DNS rebinding), so neither CORS nor the content type stops it.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], writer_of: WriterOf) -> None:
        self._app = app
        self._writer_of = writer_of
        self._names = frozenset(map(_bare_host, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 421."""
        foreign = None
        for name, value in scope["headers"] if scope["type"] == "http" else ():
            if name == b"host" and _bare_host(value.decode("latin-1")) not in self._names:
                foreign = value
                break
        if foreign is None:  # or none is named, as no browser does
            await self._app(scope, receive, send)
            return
        shown = foreign[:_MAX_HOST_CHARS].decode("latin-1")
        message = f"This server has no name {shown!r}: its operator can add one by --allowed-hosts."
        await refuse(HTTPStatus.MISDIRECTED_REQUEST, message, self._writer_of(scope["path"]))(scope, receive, send)


@lru_cache(maxsize=64)
def _bare_host(host: str) -> str:
    """Return a host's name or address without port, brackets and a dot at its end."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host if host.count(":") > 1 else host.partition(":")[0]).removesuffix(".")


class RequestIds:
    """Answer with the client's X-Request-Id, or a new one, which then is the request's id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and add the header to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.setdefault("X-Request-Id", secrets.token_hex(16))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
