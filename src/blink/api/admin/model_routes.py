# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's routes that let an engine sleep, and give it other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from blink.api.admin.pause_routes import AdminService, pause_engines, ready_clients, resume_engines
from blink.api.admin.rights import check_admin
from blink.api.http.bodies import JSON
from blink.errors import BadRequestError
from blink.link.model_orders import (
    ask_sleep,
    ask_update,
    ask_wake_up,
    check_level,
    check_obeys,
    check_sleeps,
    check_tags,
)
from blink.region.layout import Absent

UPDATED: Final = {"success": True, "message": "Succeeded to update model weights."}


class UpdateBody(BaseModel):
    """SGLang's body of /update_weights_from_disk."""

    model_path: str = Field(min_length=1, max_length=4096, description="a folder or file, on the engine's host")
    load_format: str | None = Field(None, max_length=64, description="as --load-format; none: as before")
    abort_all_requests: bool = Field(False, description="whether open requests end; else those that run end first")
    flush_cache: bool = Field(True, description="whether cached prefixes are forgotten")


def model_routes(service: AdminService) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/sleep", response_class=Response)
    async def sleep(request: Request, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        """Pause, and free the KV cache (level 1), or the weights too (level 2)."""
        check_engine(service, request)
        check_level(level)
        await asyncio.to_thread(check_sleeps, service.config.region)
        await pause_engines(service.poller, mode, clears_cache=True)
        await asyncio.to_thread(ask_sleep, service.config.region, level)
        return Response()

    @router.post("/wake_up", response_class=Response)
    async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take memory back (weights, kv_cache, or both); the engine goes on when it has both."""
        check_engine(service, request)
        if await asyncio.to_thread(ask_wake_up, service.config.region, check_tags(tags)):
            await resume_engines(service.poller)
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Say whether the engine lacks its KV cache or its weights."""
        check_admin(service.config, request)
        sleeps = Absent.KV_CACHE | Absent.WEIGHTS
        return {"is_sleeping": any(client.absent & sleeps for client in ready_clients(service.poller))}

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateBody, request: Request) -> dict[str, bool | str | int]:
        """Read other weights of the same model in the place of these."""
        check_engine(service, request)
        update = partial(ask_update, service.config.region, body.model_path, body.load_format or "")
        await replace_weights(service, update, clears_cache=body.flush_cache, aborts=body.abort_all_requests)
        return {**UPDATED, "num_paused_requests": 0}

    return router


async def replace_weights(
    service: AdminService, order: Callable[..., None], *, clears_cache: bool, aborts: bool = False
) -> None:
    """Let an engine take other weights by an order, paused as long as that takes; a paused one stays so.

    order: takes clears_cache; aborts: whether open requests end; else those that run end first.

    Raises:
        BlinkError: what the order raises; or the engine cannot be paused.
    """
    was_paused = all(client.is_paused for client in ready_clients(service.poller))
    if aborts or not was_paused:
        await pause_engines(service.poller, "abort" if aborts else "wait", clears_cache=clears_cache)
    try:
        await asyncio.to_thread(order, clears_cache=clears_cache)
    finally:
        if not was_paused and not any(client.absent for client in ready_clients(service.poller)):
            await resume_engines(service.poller)


def check_engine(service: AdminService, request: Request, media_type: str = JSON) -> None:
    """Refuse who may not change the engine's model, and engines that are not reached so. media_type: of the body.

    Raises:
        NotFoundError: nobody may.
        BadRequestError: the engine takes no such order.
        EngineUnavailableError: there is no engine.
    """
    check_admin(service.config, request, media_type)
    service.poller.group.require_info()
    if service.config.data_parallel_size > 1:
        raise BadRequestError("Engines of --data-parallel-size neither sleep nor take other weights yet.")
    check_obeys(service.config.region)
