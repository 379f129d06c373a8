# SPDX-License-Identifier: Apache-2.0
"""A server of the page at / whose chat says what a test has written: deltas of any kind, slowly or at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from blink.api.pages.docs import add_docs_page
from blink.api.pages.files import page_routes
from ports import free_port
from processes import wait_for

MODEL = "scripted"
_UNKNOWN = [{"content": "I do not know."}]


@dataclass
class ScriptedChat:
    """What the server says and what it was asked; tests change it while it runs."""

    url: str
    replies: dict[str, list[dict[str, Any]]]  # deltas, by a word of the last message
    unavailable: str = ""  # the reason with which all is answered 503
    bodies: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)  # what a delta {"wait": true} waits for

    def reply_to(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the deltas for a request."""
        last = body["messages"][-1]["content"]
        return next((deltas for word, deltas in self.replies.items() if word in last), _UNKNOWN)


@contextmanager
def serve_script(replies: dict[str, list[dict[str, Any]]]) -> Iterator[ScriptedChat]:
    """Serve the page and a scripted chat on loopback."""
    port = free_port()
    chat = ScriptedChat(f"http://127.0.0.1:{port}", replies)
    server = uvicorn.Server(uvicorn.Config(_create_app(chat), host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, 300)
        yield chat
    finally:
        chat.go_on.set()
        server.should_exit = True
        thread.join(30)


def _create_app(chat: ScriptedChat) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)
    app.include_router(page_routes())
    add_docs_page(app)

    @app.get("/health")
    async def health() -> Response:
        return _refusal(chat) or Response()

    @app.get("/v1/models")
    async def models() -> Response:
        return _refusal(chat) or JSONResponse({"object": "list", "data": [{"id": MODEL}]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("", media_type="text/plain")

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        chat.bodies.append(body := await request.json())
        return _refusal(chat) or StreamingResponse(_stream(chat, body), media_type="text/event-stream")

    return app


def _refusal(chat: ScriptedChat) -> Response | None:
    return JSONResponse({"error": {"message": chat.unavailable}}, 503) if chat.unavailable else None


async def _stream(chat: ScriptedChat, body: dict[str, Any]) -> AsyncIterator[str]:
    deltas = chat.reply_to(body)
    for delta in deltas:
        if delta.get("wait"):
            while not chat.go_on.is_set():
                await asyncio.sleep(0.01)
            continue
        yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await asyncio.sleep(0.002)
    reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
    yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    yield _event({"choices": [], "usage": {"completion_tokens": len(deltas)}})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
