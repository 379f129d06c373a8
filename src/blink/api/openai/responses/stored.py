# SPDX-License-Identifier: Apache-2.0
"""The routes of stored responses: get, delete, cancel, list the input. Who has another key finds nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from blink.api.http.clients import owner_of
from blink.api.serving.body import MAX_ID_CHARS
from blink.api.serving.response_store import Kept, ResponseStore, StoreLimits, find_kept, open_store
from blink.errors import BadRequestError, NotFoundError

_JSON = "application/json"
_PATH = "/v1/responses/{name}"


def stored_response_routes(limits: StoreLimits | None) -> APIRouter:
    """Return the routes; without a store each says that nothing is stored."""
    router = APIRouter()

    def find(request: Request, name: str) -> tuple[ResponseStore, Kept]:
        if limits is None:
            shown = name[:MAX_ID_CHARS]
            raise NotFoundError(f"Response with id '{shown}' not found: this server stores no responses.")
        return open_store(limits), find_kept(limits, owner_of(request.scope), name)

    @router.get(_PATH)
    async def show_response(request: Request, name: str, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise BadRequestError("A stored response is not streamed: get it without stream.", "stream")
        return Response(find(request, name)[1].response, media_type=_JSON)

    @router.delete(_PATH)
    async def delete_response(request: Request, name: str) -> dict[str, Any]:
        """Forget a stored response; one that is in progress ends."""
        store, _ = find(request, name)
        store.delete(owner_of(request.scope), name)
        return {"id": name, "object": "response", "deleted": True}

    @router.post(f"{_PATH}/cancel")
    async def cancel_response(request: Request, name: str) -> Response:
        """End a response that is made in the background."""
        store, kept = find(request, name)
        response = orjson.loads(kept.response)
        if not response["background"]:
            raise BadRequestError("Cannot cancel a synchronous response.", "response_id")
        if kept.status == "in_progress":
            cancelled = orjson.dumps(response | {"status": "cancelled"})
            store.settle(owner_of(request.scope), name, "cancelled", cancelled)
            kept = find(request, name)[1]
        return Response(kept.response, media_type=_JSON)

    @router.get(f"{_PATH}/input_items")
    async def list_input_items(
        request: Request,
        name: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List what a stored response answers."""
        items = orjson.loads(find(request, name)[1].input)
        return _page(items if order == "asc" else items[::-1], limit, after)

    return router


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return the first items behind one."""
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequestError("after names no item of this response.", "after")
        items = items[places[0] + 1 :]
    page = [_show(item) for item in items[:limit]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}


def _show(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as OpenAI lists it: a message has a type, and a list of parts."""
    if item.get("type", "message") != "message" or not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "type": "message", "content": [{"type": kind, "text": item["content"]}]}
