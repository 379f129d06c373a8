# SPDX-License-Identifier: Apache-2.0
"""Paths of vLLM's and SGLang's servers that are not here: each answers 404 and says why, or what to ask instead."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request

from blink.errors import NotFoundError

_TEXT = "its models generate text"
_ABSENT: dict[str, tuple[str, ...]] = {
    "Not here: /v1/embeddings makes embeddings, of models that do.": ("/v2/embed", "/pooling", "/encode"),
    "This server classifies nothing: /v1/score and /v1/rerank score texts, of models that do.": ("/classify",),
    f"This server hears and speaks nothing: {_TEXT}.": (
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    ),
    "Handles of CUDA IPC come as pickles, which are not read: POST /update_weights_from_tensor takes a stream.": (
        "/update_weights_from_ipc",
    ),
    "Not here: POST /update_weights_from_disk and /update_weights_from_tensor give an engine other weights.": (
        "/get_weights_by_name", "/update_weight_version",
    ),
    "Not here: /sleep and /wake_up free an engine's memory and take it back.": (
        "/release_memory_occupation", "/resume_memory_occupation",
    ),
    "The server has no profiler: `blink trace` writes a timeline of its steps.": ("/start_profile", "/stop_profile"),
    "No code is run for clients.": ("/collective_rpc",),
    "Not here: /tokenize and /v1/chat/completions/render return the tokens of a chat.": ("/v1/messages/render",),
    "Not here: /v1/completions takes token ids, and returns them with return_token_ids.": (
        "/inference/v1/generate", "/generate",
    ),
    "Not here: /server_info and /v1/models tell of the model.": ("/model_info", "/get_model_info", "/get_server_info"),
    "Not here: /health answers 503 while the engine gives no sign of life.": ("/health_generate",),
    "Not here: POST /reset_prefix_cache empties the prefix cache.": ("/flush_cache",),
    "Not here: a client ends its request by closing the connection.": ("/abort_request", "/abort_requests"),
}  # fmt: skip
REASONS = {path: reason for reason, paths in _ABSENT.items() for path in paths}


def absent_routes() -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    add_refusals(router, REASONS)
    return router


def add_refusals(router: APIRouter, reasons: Mapping[str, str]) -> None:
    """Let paths answer 404, each with its reason."""

    async def refuse(request: Request) -> None:
        raise NotFoundError(reasons[request.url.path])

    for path in reasons:
        router.add_api_route(path, refuse, methods=["GET", "POST"], include_in_schema=False)
