# SPDX-License-Identifier: Apache-2.0
"""The page at /: static files of this package, which load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.resources import files

from fastapi import APIRouter, Request, Response

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_STYLES = ("page.css", "chat.css", "markdown.css")
_FRAME = ("page.js", "theme.js", "dom.js", "connection.js", "state.js", "figures.js")
_CHAT = ("talk.js", "chat.js", "runs.js", "stream.js", "answer.js", "conversation.js", "parameters.js")
_MESSAGES = ("message.js", "markdown.js", "math.js", "copy.js", "escape.js")
_KEPT = ("sidebar.js", "library.js", "store.js", "export.js")
_FILES = ("index.html", *_STYLES, *_FRAME, *_CHAT, *_MESSAGES, *_KEPT)
# Of every page: its files come from here, and nothing else is loaded, run or framed. Markup comes from DOMPurify alone.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Return the routes of the page's files; they need no key: the page asks for it."""
    router = APIRouter(include_in_schema=False)
    for name in (*_FILES, *library_files()):
        add_static_file(router, "/" if name == "index.html" else f"/page/{name}", name)
    return router


def library_files() -> Iterator[str]:
    """Yield the names of other projects' files that the page loads, below the static files' folder."""
    libraries = json.loads((files("blink.api.pages") / "libraries.json").read_text())
    for library in libraries.values():
        yield from (f"libraries/{name}" for name in library["files"] if not name.endswith(".txt"))


def add_static_file(router: APIRouter, path: str, name: str) -> None:
    """Serve one of this package's static files at a path; a browser that has it already is told so."""
    content = (files("blink.api.pages") / "static" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    # A plain route, which needs no description: FastAPI's take a millisecond each to make.
    router.add_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
