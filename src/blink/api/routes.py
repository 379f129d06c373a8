# SPDX-License-Identifier: Apache-2.0
"""The routes of the API."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from blink import __version__
from blink.api.admin.routes import admin_routes
from blink.api.endpoint import Endpoint
from blink.api.endpoints import ENDPOINTS, error_writer_of
from blink.api.http.bodies import check_content_type
from blink.api.http.errors import bug_response, error_response, http_error_response, install_error_responses
from blink.api.llama_cpp.routes import llama_cpp_routes
from blink.api.observe.process_metrics import render_process
from blink.api.observe.server_info import describe_server
from blink.api.ollama.routes import ollama_routes
from blink.api.openai.absent import absent_routes
from blink.api.openai.lora_routes import lora_list_routes, lora_routes
from blink.api.openai.responses.stored import stored_response_routes
from blink.api.pages.docs import add_docs_page
from blink.api.pages.files import page_routes
from blink.api.service import ApiService
from blink.errors import BlinkError, ClientGoneError, NotFoundError
from blink.text.tokenizer_info import describe_tokenizer

Route = TypeVar("Route", bound=Callable[..., Any])


_METRICS = "/metrics"

logger = logging.getLogger(__name__)


def create_app(service: ApiService, **options: Any) -> ASGIApp:
    """Return the application of one worker; `options` are FastAPI's."""
    # Clients that name no content type mean JSON.
    own_pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}  # the framework's load scripts from elsewhere
    app = FastAPI(title="Blink", version=__version__, strict_content_type=False, **own_pages, **options)
    install_error_responses(app, error_writer_of)
    add_docs_page(app)
    app.include_router(_endpoint_routes(service, generate=True))
    app.include_router(stored_response_routes(service.store_limits))
    app.include_router(_model_routes(service))
    app.include_router(lora_routes(service))
    app.include_router(admin_routes(service))
    app.include_router(_endpoint_routes(service, generate=False))
    app.include_router(ollama_routes(service))
    app.include_router(llama_cpp_routes(service))
    app.include_router(lora_list_routes())
    app.include_router(_status_routes(service))
    app.include_router(_description_routes(service))
    app.include_router(absent_routes())
    if service.config.page:
        app.include_router(page_routes())
    return DirectRoutes(app, service)


def _read(router: APIRouter, path: str, *, is_alias: bool = False) -> Callable[[Route], Route]:
    """Register a route for GET, and for HEAD, which FastAPI does not add by itself."""

    def register(route: Route) -> Route:
        router.get(path, include_in_schema=not is_alias)(route)
        router.head(path, include_in_schema=False)(route)
        return route

    return register


class DirectRoutes:
    """Answers the table's endpoints, and scrapes: the framework's way to its routes takes half as long as the rest."""

    def __init__(self, app: ASGIApp, service: ApiService) -> None:
        self._app = app
        self._service = service
        self._endpoints = {path: endpoint for endpoint in ENDPOINTS.values() for path in endpoint.paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        response = None
        if scope["type"] == "http":
            if scope["method"] == "POST" and (endpoint := self._endpoints.get(scope["path"])) is not None:
                response = await self._answer(endpoint, Request(scope, receive))
            elif scope["path"] == _METRICS and scope["method"] in ("GET", "HEAD"):
                response = self._scrape()
        await (response or self._app)(scope, receive, send)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        try:
            return await self._service.answer(endpoint, request)
        except BlinkError as error:
            if self._service.config.enable_log_requests:
                _log_refusal(endpoint.path, error)
            return error_response(error, endpoint.error_body)
        except HTTPException as error:
            return http_error_response(error, endpoint.error_body)
        except Exception as error:
            logger.exception("a request could not be answered")
            return bug_response(error, endpoint.error_body)

    def _scrape(self) -> Response:
        try:
            return _scrape(self._service)
        except Exception as error:
            logger.exception("the metrics could not be read")
            return bug_response(error)


def _scrape(service: ApiService) -> Response:
    return Response(service.render_metrics() + render_process(), media_type=CONTENT_TYPE_LATEST)


def _log_refusal(path: str, error: BlinkError) -> None:
    """Write why a request was not answered; a client that left is no error."""
    fields: dict[str, Any] = {"path": path, "status": int(error.status)}
    if isinstance(error, ClientGoneError):
        logger.info("not answered: its client has gone (%(status)d)", fields, extra={"fields": fields})
        return
    fields["error"] = error.message
    logger.info("refused with %(status)d: %(error)s", fields, extra={"fields": fields})


def _endpoint_routes(service: ApiService, *, generate: bool) -> APIRouter:
    """Return the routes of the endpoints that generate, or of the others; DirectRoutes answers them all before."""
    router = APIRouter()
    for endpoint in ENDPOINTS.values():
        for path in endpoint.paths if (endpoint.writing is not None) == generate else ():
            router.add_api_route(
                path,
                _show_body(endpoint),
                methods=["POST"],
                name=endpoint.name,
                description=endpoint.summary,
                response_model=None,
                include_in_schema=path == endpoint.path,
                route_class_override=_route_class(partial(service.answer, endpoint)),
            )
    return router


def _route_class(answer: Callable[[Request], Coroutine[Any, Any, Response]]) -> type[APIRoute]:
    """Return the class of a route whose body is read within the limits, not by the framework."""

    class EndpointRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            return answer

    return EndpointRoute


def _show_body(endpoint: Endpoint) -> Callable[..., Any]:
    """Return a function that is never called, from which the API's description takes the body."""

    async def route(body: Any) -> None:
        del body

    route.__annotations__["body"] = endpoint.body
    return route


def _model_routes(service: ApiService) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        root, parent = service.find_root(name)
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "blink",
            "root": root,
            "parent": parent,
            "max_model_len": service.engine.max_model_len,
        }

    @_read(router, "/models", is_alias=True)
    @_read(router, "/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the names of the one model that this server has, and its adapters."""
        return {"object": "list", "data": [card(name) for name in service.all_names]}

    @_read(router, "/models/{name:path}", is_alias=True)
    @_read(router, "/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        """Describe a model."""
        service.check_model(name)
        return card(name)

    return router


def _status_routes(service: ApiService) -> APIRouter:
    router = APIRouter()

    @_read(router, "/health")
    @_read(router, "/v1/health", is_alias=True)
    @_read(router, "/ping")
    @router.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """Answer 200 when requests can be served now, else 503."""
        service.require_engine()
        return Response()

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Let the engine forget all cached prefixes; requests that run keep their blocks."""
        check_content_type(request, service.config.allowed_origins)  # a foreign page's post is refused
        service.require_engine()
        await service.poller.reset_prefix_cache()
        return Response()

    @_read(router, "/version")
    async def version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": __version__}

    @_read(router, "/load")
    async def load() -> dict[str, int]:
        """Return the sequences of this worker that the engine has."""
        return {"server_load": service.poller.table.num_open}

    @_read(router, _METRICS)
    async def metrics() -> Response:
        """Return the metrics of all workers and the engine."""
        return _scrape(service)

    return router


def _description_routes(service: ApiService) -> APIRouter:
    router = APIRouter()

    @_read(router, "/server_info")
    async def server_info() -> dict[str, Any]:
        """Return the flags of this frontend without its secrets, and what its engine says about itself."""
        return describe_server(service.config, service.engine, service.engine_stats)

    @_read(router, "/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return the tokenizer's configuration and the chat template (--enable-tokenizer-info-endpoint)."""
        if not service.config.enable_tokenizer_info_endpoint:
            raise NotFoundError("/tokenizer_info is switched off (--enable-tokenizer-info-endpoint).")
        return describe_tokenizer(service.config.model, service.assets)

    return router
