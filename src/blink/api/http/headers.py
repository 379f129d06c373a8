# SPDX-License-Identifier: Apache-2.0
"""The headers of a request, as ASGI has them: a list of pairs, whose names are in small letters."""

from __future__ import annotations

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str:
    """Return the first header of a name in small letters; empty where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""
