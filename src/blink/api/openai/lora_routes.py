# SPDX-License-Identifier: Apache-2.0
"""The paths of adapters: vLLM's, which load and unload them while a server runs, llama.cpp's and SGLang's."""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from blink.api.http.bodies import check_content_type
from blink.api.http.clients import owner_of
from blink.api.openai.absent import add_refusals
from blink.api.serving.adapters import ServedAdapters
from blink.config import FrontendConfig
from blink.errors import NotFoundError
from blink.lora_config import UPDATING_VARIABLE

_TEXT = "text/plain"
ELSEWHERE: dict[str, str] = dict.fromkeys(
    ("/load_lora_adapter", "/unload_lora_adapter"),
    "Not here: /v1/load_lora_adapter and /v1/unload_lora_adapter change adapters.",
)


class LoadAdapterBody(BaseModel):
    """Which adapter to load."""

    lora_name: str = Field(description="the name that requests call it")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, on the engine's host")
    load_inplace: bool = Field(False, description="whether it may take the place of one that has the name")


class UnloadAdapterBody(BaseModel):
    """Which adapter to unload."""

    lora_name: str = Field(description="the name that it was loaded under")
    lora_int_id: int | None = Field(None, description="taken, without effect")


class AdapterService(Protocol):
    """What the routes need of the server."""

    config: FrontendConfig
    adapters: ServedAdapters

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names of the base model."""
        ...


def lora_routes(served: AdapterService) -> APIRouter:
    """Return vLLM's routes, and what is said at SGLang's."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", response_class=Response)
    async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> Response:
        """Load an adapter (--enable-lora, --allow-runtime-lora-updating and an API key)."""
        _check_rights(served, request)
        names = served.model_names
        await served.adapters.load(body.lora_name, body.lora_path, names, in_place=body.load_inplace)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type=_TEXT)

    @router.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> Response:
        """Unload an adapter; requests that use it may end."""
        _check_rights(served, request)
        await served.adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type=_TEXT)

    add_refusals(router, ELSEWHERE)
    return router


def lora_list_routes() -> APIRouter:
    """Return llama.cpp's routes."""
    router = APIRouter()

    @router.get("/lora-adapters")
    @router.head("/lora-adapters", include_in_schema=False)
    async def lora_adapters() -> list[Any]:
        """List the LoRA adapters: there are none."""
        return []

    return router


def _check_rights(served: AdapterService, request: Request) -> None:
    """Refuse who may not change adapters.

    Raises:
        NotFoundError: nobody may.
    """
    check_content_type(request, served.config.allowed_origins)  # a foreign page's post is refused
    if not served.adapters.is_enabled:
        raise NotFoundError("This server takes no LoRA adapters (--enable-lora).")
    if not served.adapters.may_change:
        raise NotFoundError(
            f"Adapters are not changed while this server runs (--allow-runtime-lora-updating or {UPDATING_VARIABLE}=1)."
        )
    if not owner_of(request.scope):
        raise NotFoundError("Adapters are changed with a key only: start the server with --api-key or --admin-api-key.")
