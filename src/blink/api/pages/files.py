# SPDX-License-Identifier: Apache-2.0
"""The page at /: static files of this package, which load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = ("index.html", "page.css", "page.js", "chat.js", "state.js", "figures.js", "icon.svg")
# Of every page: its files come from here, and nothing else is loaded, run or framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Return the routes of the page's files; they need no key: the page asks for it."""
    router = APIRouter(include_in_schema=False)
    for name in _FILES:
        add_static_file(router, "/" if name == "index.html" else f"/page/{name}", name)
    return router


def add_static_file(router: APIRouter, path: str, name: str) -> None:
    """Serve one of this package's static files at a path."""
    content = (files("blink.api.pages") / "static" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def answer() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    router.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
