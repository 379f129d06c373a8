# SPDX-License-Identifier: Apache-2.0
"""The routes of the API."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from blink import __version__
from blink.api.completions import CompletionService
from blink.api.error_body import install_error_responses
from blink.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeTextBody,
)
from blink.errors import BadRequestError
from blink.text.prompt import PromptRules, prepare_prompts

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def create_app(service: CompletionService, **options: Any) -> FastAPI:
    """Return the application of one worker; `options` are FastAPI's."""
    # Clients that name no content type mean JSON.
    app = FastAPI(title="Blink", version=__version__, strict_content_type=False, **options)
    install_error_responses(app)
    app.include_router(_generation_routes(service))
    app.include_router(_model_routes(service))
    app.include_router(_token_routes(service))
    app.include_router(_status_routes(service))
    return app


def _read(router: APIRouter, path: str) -> Callable[[Endpoint], Endpoint]:
    """Register a route for GET, and for HEAD, which FastAPI does not add by itself."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.get(path)(endpoint)
        router.head(path, include_in_schema=False)(endpoint)
        return endpoint

    return register


def _generation_routes(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        return await service.answer(body, request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await service.answer(body, request)

    return router


def _model_routes(service: CompletionService) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "blink",
            "root": service.assets.root,
            "parent": None,
            "max_model_len": service.engine.max_model_len,
        }

    @_read(router, "/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the one model that this server has."""
        return {"object": "list", "data": [card()]}

    @_read(router, "/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        """Describe a model."""
        service.check_model(name)
        return card()

    return router


def _token_routes(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the token ids of a text or a conversation."""
        service.check_model(body.model)
        text = (
            body.prompt if isinstance(body, TokenizeTextBody) else service.planner.render(body.messages, body.rendering)
        )
        tokenizer, engine = service.assets.tokenizer, service.engine
        tokens: list[int] = []
        if text:
            rules = PromptRules(add_special_tokens=body.add_special_tokens, any_length=True)
            tokens = (await prepare_prompts([text], rules, tokenizer, engine))[0].tokens.tolist()
        return {
            "count": len(tokens),
            "max_model_len": engine.max_model_len,
            "tokens": tokens,
            "token_strs": [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Return the text of token ids."""
        service.check_model(body.model)
        for token in body.tokens:
            if not 0 <= token < service.engine.vocab_size:
                raise BadRequestError(f"Token id {token} is out of vocabulary.", "tokens")
        return {"prompt": service.assets.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


def _status_routes(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @_read(router, "/health")
    @_read(router, "/ping")
    async def health() -> Response:
        """Answer 200 when requests can be served now, else 503."""
        assert service.engine  # raises the 503
        return Response()

    @_read(router, "/version")
    async def version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": __version__}

    @_read(router, "/load")
    async def load() -> dict[str, int]:
        """Return the sequences of this worker that the engine has."""
        return {"server_load": service.poller.table.num_open}

    @_read(router, "/metrics")
    async def metrics() -> Response:
        """Return the metrics of all workers and the engine."""
        return Response(service.poller.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
