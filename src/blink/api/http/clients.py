# SPDX-License-Identifier: Apache-2.0
"""Who asks: the key that a request was let in with, else the address it comes from."""

from __future__ import annotations

from hashlib import blake2b

from starlette.types import Scope

_KEY = "blink.key"
_ADMIN = "blink.admin"
_FLOW_BYTES = 4


def note_key(scope: Scope, digest: bytes) -> None:
    """Remember the digest of the key that a request was let in with."""
    scope[_KEY] = digest


def note_admin(scope: Scope) -> None:
    """Remember that a request was let in with an admin key."""
    scope[_ADMIN] = True


def is_admin(scope: Scope) -> bool:
    """Say whether a request was let in with an admin key."""
    return scope.get(_ADMIN) is True


def owner_of(scope: Scope) -> bytes:
    """Return the digest of the key that a request was let in with; nothing where none is asked for."""
    return scope.get(_KEY) or b""


def salt_of(scope: Scope, salt: str | None) -> str | None:
    """Return what keeps the cached blocks of a request's API key apart from others', and those of its own salts."""
    key: bytes | None = scope.get(_KEY)
    return salt if key is None else f"{key.hex()}:{salt or ''}"


def flow_of(scope: Scope) -> int:
    """Return a number from 1 to 2^32 - 1 for a request's client, the same for all of its requests."""
    peer = scope.get("client")
    name = scope.get(_KEY) or (str(peer[0]).encode() if peer else b"")
    return int.from_bytes(blake2b(name, digest_size=_FLOW_BYTES).digest(), "little") or 1
