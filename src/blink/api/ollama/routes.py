# SPDX-License-Identifier: Apache-2.0
"""The paths of Ollama's API without a body: the model, the version; and those that this server refuses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from blink.api.ollama.model_card import describe, rfc3339
from blink.api.serving.served_model import ServedModel
from blink.errors import NotFoundError

_VERSION = "0.12.6"  # of Ollama, whose API this is: clients ask for a version that has what they need
_FOREVER = 2**32  # seconds since 1970 until which a model stays
_NO_EMBEDDINGS = "This server makes no embeddings: its models generate text."
_ONE_MODEL = "This server has the one model that it was started with: `blink serve MODEL`."
_REFUSED = {
    "/api/embed": _NO_EMBEDDINGS,
    "/api/embeddings": _NO_EMBEDDINGS,
    "/api/pull": _ONE_MODEL,
    "/api/push": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
}


def ollama_routes(served: ServedModel) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/api/version")
    @router.head("/api/version", include_in_schema=False)
    async def ollama_version() -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": _VERSION}

    @router.get("/api/tags")
    @router.head("/api/tags", include_in_schema=False)
    async def ollama_tags() -> dict[str, Any]:
        """List the one model of this server, once for each of its names."""
        return {"models": [describe(name, served.assets) for name in served.model_names]}

    @router.get("/api/ps")
    @router.head("/api/ps", include_in_schema=False)
    async def ollama_ps() -> dict[str, Any]:
        """List the model that is loaded."""
        card = describe(served.model_names[0], served.assets)
        del card["modified_at"]
        engine = served.engine
        loaded = {"expires_at": rfc3339(_FOREVER), "size_vram": card["size"], "context_length": engine.max_model_len}
        return {"models": [card | loaded]}

    async def refuse(request: Request) -> None:
        raise NotFoundError(_REFUSED[request.url.path])

    for path in _REFUSED:
        router.add_api_route(path, refuse, methods=["POST", "DELETE"], include_in_schema=False)
    return router
