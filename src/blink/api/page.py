# SPDX-License-Identifier: Apache-2.0
"""The page at /: static files of this package, which load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = ("index.html", "page.css", "page.js", "chat.js", "state.js", "figures.js", "icon.svg")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Return the routes of the page's files; they need no key: the page asks for it."""
    router = APIRouter(include_in_schema=False)
    folder = files("blink.api") / "static"
    for name in _FILES:
        kind = _TYPES[name.rpartition(".")[2]]
        _add_file(router, "/" if name == "index.html" else f"/page/{name}", (folder / name).read_bytes(), kind)
    return router


def _add_file(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    async def answer() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    router.add_api_route(path, answer, methods=["GET", "HEAD"])
