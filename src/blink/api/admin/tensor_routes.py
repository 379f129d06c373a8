# SPDX-License-Identifier: Apache-2.0
"""SGLang's and vLLM's routes that give an engine weights tensor by tensor: in a stream, or from a trainer's group.

Tensors are kept aside while the engine serves. An update of several parts has a begin and an end; any other part is an
update by itself.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Request
from starlette.requests import ClientDisconnect

from blink.api.admin.ipc_handles import read_handles
from blink.api.admin.model_routes import UPDATED, check_engine, replace_weights
from blink.api.admin.pause_routes import AdminService
from blink.api.admin.tensor_schema import (
    GROUP,
    BroadcastBody,
    EndUpdateBody,
    GroupInfo,
    InitGroupBody,
    InitTransferBody,
    LeaveGroupBody,
    StartUpdateBody,
    UpdateInfo,
    UpdateWeightsBody,
    list_tensors,
)
from blink.api.http.bodies import JSON
from blink.api.http.headers import header_of
from blink.errors import BadRequestError, ClientGoneError
from blink.link.model_orders import ask_begin, ask_broadcast, ask_commit, ask_join, ask_leave, ask_share, pass_tensors

_STREAM: Final = "application/octet-stream"
_OPENAPI: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "tensors as a safetensors file has them",
        "content": {_STREAM: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class TensorUpdate:
    """What both APIs ask of an engine."""

    def __init__(self, service: AdminService) -> None:
        self._service, self._region = service, service.config.region

    async def join(self, info: GroupInfo, name: str, backend: str = "") -> None:
        """Let the engine join a group; return when all of its ranks have. backend: empty: its device's."""
        place = info.master_address, info.master_port, info.rank_offset, info.world_size
        await asyncio.to_thread(ask_join, self._region, name, *place, backend)

    async def take_stream(self, request: Request, *, clears_cache: bool, aborts: bool) -> None:
        """Give the engine a request's body as it comes."""
        try:
            is_open = await pass_tensors(self._region, request.stream())
        except ClientDisconnect:
            raise ClientGoneError from None
        if not is_open:
            await self.commit(clears_cache=clears_cache, aborts=aborts)

    async def take_broadcast(self, body: BroadcastBody) -> None:
        """Let the engine take what rank 0 of a group broadcasts."""
        tensors = list_tensors(body.names, body.dtypes, body.shapes)
        if not await asyncio.to_thread(ask_broadcast, self._region, body.group_name, tensors):
            await self.commit(clears_cache=body.flush_cache, aborts=body.abort_all_requests)

    async def take_shared(self, info: UpdateInfo, pickled: str) -> None:
        """Let the engine take what lies in another process's memory of its GPU."""
        tensors = list_tensors(info.names, info.dtype_names, info.shapes)
        if not await asyncio.to_thread(ask_share, self._region, tensors, read_handles(pickled, len(tensors))):
            await self.commit()

    async def begin(self) -> None:
        """Let what comes be parts of one update."""
        await asyncio.to_thread(ask_begin, self._region)

    async def commit(self, *, clears_cache: bool = True, aborts: bool = False) -> None:
        """Let the engine load what has come."""
        order = partial(ask_commit, self._region)
        await replace_weights(self._service, order, clears_cache=clears_cache, aborts=aborts)


def tensor_routes(service: AdminService) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    update = TensorUpdate(service)
    _add_stream_route(router, service, update)
    _add_sglang_routes(router, service, update)
    _add_vllm_routes(router, service, update)
    return router


def _add_stream_route(router: APIRouter, service: AdminService, update: TensorUpdate) -> None:
    @router.post("/update_weights_from_tensor", openapi_extra=_OPENAPI)
    async def update_weights_from_tensor(
        request: Request, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> dict[str, bool | str]:
        """Take tensors as a safetensors file has them, of any size; a stream that ends early changes nothing."""
        if header_of(request.scope, b"content-type").startswith(JSON):
            check_engine(service, request)
            raise BadRequestError(
                f"serialized_named_tensors are pickles, which are not read: send safetensors as {_STREAM}.",
                "serialized_named_tensors",
            )
        check_engine(service, request, _STREAM)
        await update.take_stream(request, clears_cache=flush_cache, aborts=abort_all_requests)
        return UPDATED


def _add_sglang_routes(router: APIRouter, service: AdminService, update: TensorUpdate) -> None:
    @router.post("/init_weights_update_group")
    async def init_weights_update_group(body: InitGroupBody, request: Request) -> dict[str, bool | str]:
        """Join a trainer's group of processes; answer when all ranks have."""
        check_engine(service, request)
        await update.join(body, body.group_name, body.backend)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    @router.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(
        request: Request, body: Annotated[LeaveGroupBody | None, Body()] = None
    ) -> dict[str, bool | str]:
        """Leave a trainer's group of processes."""
        check_engine(service, request)
        await asyncio.to_thread(ask_leave, service.config.region, (body or LeaveGroupBody()).group_name)
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    @router.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: BroadcastBody, request: Request) -> dict[str, bool | str]:
        """Take tensors that rank 0 of a group broadcasts, in the order of their names."""
        check_engine(service, request)
        await update.take_broadcast(body)
        return UPDATED

    @router.post("/begin_weight_update")
    async def begin_weight_update(request: Request) -> dict[str, bool | str]:
        """Let the tensors that come be one update, which /end_weight_update loads."""
        check_engine(service, request)
        await update.begin()
        return {"success": True, "message": "The update has begun."}

    @router.post("/end_weight_update")
    async def end_weight_update(
        request: Request, body: Annotated[EndUpdateBody | None, Body()] = None
    ) -> dict[str, bool | str]:
        """Load the tensors that have come."""
        check_engine(service, request)
        await update.commit(clears_cache=(body or EndUpdateBody()).flush_cache)
        return UPDATED


def _add_vllm_routes(router: APIRouter, service: AdminService, update: TensorUpdate) -> None:
    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitTransferBody, request: Request) -> dict[str, str]:
        """Join a trainer's group of processes; answer when all ranks have."""
        check_engine(service, request)
        await update.join(body.init_info, GROUP)
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update")
    async def start_weight_update(
        request: Request, body: Annotated[StartUpdateBody | None, Body()] = None
    ) -> dict[str, str]:
        """Let the tensors that come be one update, which /finish_weight_update loads."""
        del body  # its only value is the default
        check_engine(service, request)
        await update.begin()
        return {"message": "Weight update started"}

    @router.post("/update_weights")
    async def update_weights(body: UpdateWeightsBody, request: Request) -> dict[str, str]:
        """Take tensors that rank 0 of the group broadcasts, or that lie in a trainer's memory of the engine's GPU."""
        check_engine(service, request)
        info = body.update_info
        if info.ipc_handles_pickled is not None:
            await update.take_shared(info, info.ipc_handles_pickled)
            return {"message": "Weights updated"}
        asked = BroadcastBody(names=info.names, dtypes=info.dtype_names, shapes=info.shapes)
        await update.take_broadcast(asked)
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        request: Request, body: Annotated[EndUpdateBody | None, Body()] = None
    ) -> dict[str, str]:
        """Load the tensors that have come."""
        check_engine(service, request)
        await update.commit(clears_cache=(body or EndUpdateBody()).flush_cache)
        return {"message": "Weight update finished"}

    @router.get("/get_world_size")
    async def get_world_size(request: Request) -> dict[str, int]:
        """Return how many ranks of a group the engine takes."""
        check_engine(service, request)
        return {"world_size": 1}
