# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's routes that pause an engine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, Protocol

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, Field

from blink.api.admin.rights import check_admin
from blink.api.serving.poller import Poller
from blink.config import FrontendConfig
from blink.errors import OverloadedError
from blink.link.client import EngineClient
from blink.link.pause import Pause, Resume

_LOOK_SECONDS = 0.002


class PauseBody(BaseModel):
    """SGLang's body of /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] = Field(
        "abort", description="end all requests; keep them; or keep them without their KV cache"
    )


class AdminService(Protocol):
    """What the routes need of the server."""

    config: FrontendConfig
    poller: Poller


def pause_routes(service: AdminService) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/pause")
    async def pause(
        request: Request,
        mode: Literal["abort", "wait", "keep"] = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool = False,
    ) -> dict[str, str]:
        """Launch nothing more: end all requests (abort), let those that run end first (wait), or keep them (keep)."""
        check_admin(service.config, request)
        await pause_engines(service.poller, "wait" if wait_for_inflight_requests else mode, clears_cache=clear_cache)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume(request: Request) -> dict[str, str]:
        """Go on after a pause."""
        check_admin(service.config, request)
        await resume_engines(service.poller)
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused(request: Request) -> dict[str, bool]:
        """Say whether every engine stands still."""
        check_admin(service.config, request)
        return {"is_paused": all(client.is_paused for client in ready_clients(service.poller))}

    @router.post("/pause_generation")
    async def pause_generation(request: Request, body: Annotated[PauseBody | None, Body()] = None) -> dict[str, str]:
        """Launch nothing more; the prefix cache stays."""
        check_admin(service.config, request)
        await pause_engines(service.poller, (body or PauseBody(mode="abort")).mode, clears_cache=False)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @router.post("/continue_generation")
    async def continue_generation(request: Request) -> dict[str, str]:
        """Go on after a pause."""
        check_admin(service.config, request)
        await resume_engines(service.poller)
        return {"message": "Generation continued successfully.", "status": "ok"}

    return router


async def pause_engines(poller: Poller, mode: str, *, clears_cache: bool) -> None:
    """Pause all engines; return when the pauses are in effect.

    Raises:
        EngineUnavailableError: there is no engine, or one goes.
        OverloadedError: another client resumed before that.
    """
    if clears_cache:
        poller.table.forget_prefixes()
    clients = ready_clients(poller)
    pauses = [Pause(client, mode, clears_cache=clears_cache) for client in clients]
    while not all(pause.has_begun for pause in pauses):
        await asyncio.sleep(_LOOK_SECONDS)
    if not all(client.is_paused for client in clients):
        raise OverloadedError("The engine goes on already: somebody resumed it before it stood still.")


async def resume_engines(poller: Poller) -> None:
    """Let all engines go on; return when they do.

    Raises:
        BadRequestError: one cannot before its model is whole.
        EngineUnavailableError: there is no engine, or one goes.
    """
    resumes = [Resume(client) for client in ready_clients(poller)]
    while not all(resume.is_done for resume in resumes):
        await asyncio.sleep(_LOOK_SECONDS)


def ready_clients(poller: Poller) -> list[EngineClient]:
    """Return the clients of all engines that serve.

    Raises:
        EngineUnavailableError: none does.
    """
    poller.group.require_info()
    return [client for client in poller.group.clients if client.ready]
