# SPDX-License-Identifier: Apache-2.0
"""The application's entry: finds the model that a request names, and passes request and answer on.

What is wrong with a request the replica's frontend says, so that errors are those of a single server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import cast

import orjson
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from blink.api.http.errors import error_json, error_response
from blink.errors import LOST_REQUEST, BadRequestError, NotFoundError
from blink.ray.call import Call, Head, broken_end, forwarded, unavailable_json
from blink.ray.metrics import merge_metrics
from blink.ray.prefix import Asked, read_body

_JSON = "application/json"
_LOST = f"{LOST_REQUEST}: its replica ended."
_OF_ALL = ("/health", "/ping", "/metrics", "/reset_prefix_cache")  # each replica of each model is asked


class Ingress:
    """Routes requests to the deployments of the models."""

    def __init__(self, models: Mapping[str, DeploymentHandle], max_body_bytes: int) -> None:
        self._handles = {name: handle.options(stream=True) for name, handle in models.items()}
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answer a request of HTTP."""
        body = bytearray()
        try:
            async for data in request.stream():
                body += data
                if len(body) > self._max_body_bytes:
                    text = f"The body is larger than {self._max_body_bytes} bytes."
                    return Response(error_json(text, BadRequestError.type, 413), 413, media_type=_JSON)
        except ClientDisconnect:
            return Response()
        path = request.url.path.removeprefix(request.scope.get("root_path", "").rstrip("/")) or "/"
        query = f"?{request.url.query}" if request.url.query else ""
        call = Call(request.method, path + query, forwarded(request.headers.raw), bytes(body))
        if path in _OF_ALL:
            return await self._ask_all(call, path)
        if path == "/v1/models":
            return await self._list_models(call)
        asked = Asked(path.removeprefix("/v1/models/")) if path.startswith("/v1/models/") else read_body(call.body)
        name = asked.model or next(iter(self._handles))
        if name not in self._handles:
            return error_response(NotFoundError(f"The model `{name}` does not exist.", "model"))
        if request.method == "POST" and not asked.model and len(self._handles) > 1:
            return error_response(BadRequestError(f"Name one of the models {', '.join(self._handles)}.", "model"))
        return await self._forward(self._handles[name], replace(call, points=asked.points))

    async def _forward(self, handle: DeploymentHandle, call: Call) -> Response:
        """Send a call to one replica, and to others while those asked refuse it; return the answer as it comes."""
        while True:
            stream = _send(handle, call)
            try:
                head = await _head(stream)
                if head.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    return _answer(head, _pass_on(stream, head, call))
                body = await _rest(stream)
            except (RayError, RayServeException) as error:
                return _unavailable(error)
            # What was lost on the way is not tried again: it may be what ended the engine.
            if head.replica in call.avoided or LOST_REQUEST.encode() in body:
                return _answer(head, body)
            call = replace(call, avoided=call.avoided | {head.replica})

    async def _each(self, handle: DeploymentHandle, call: Call) -> dict[str, tuple[Head, bytes]]:
        """Ask each replica of a model once; return the answers by replica."""
        answers: dict[str, tuple[Head, bytes]] = {}
        while True:
            stream = _send(handle, replace(call, avoided=frozenset(answers)))
            head = await _head(stream)
            body = await _rest(stream)
            if head.replica in answers:
                return answers
            answers[head.replica] = head, body

    async def _ask_all(self, call: Call, path: str) -> Response:
        """Ask each replica: metrics of all; health where each model has a healthy one; a reset where all did it."""
        try:
            answers = [await self._each(handle, call) for handle in self._handles.values()]
        except (RayError, RayServeException) as error:
            return _unavailable(error)
        if path == "/metrics":
            pages = {name: body for found in answers for name, (head, body) in found.items() if head.status == 200}
            return Response(merge_metrics(pages), media_type="text/plain; version=0.0.4")
        worst_is_enough = path == "/reset_prefix_cache"
        for found in answers:
            ranked = sorted(found.values(), key=lambda answer: answer[0].status, reverse=worst_is_enough)
            head, body = ranked[0]
            if head.status != HTTPStatus.OK:
                return _answer(head, body)
        return Response()

    async def _list_models(self, call: Call) -> Response:
        cards: list[object] = []
        for handle in self._handles.values():
            answer = await self._forward(handle, call)
            if answer.status_code != HTTPStatus.OK:
                return answer
            assert isinstance(answer, StreamingResponse)
            cards += orjson.loads(b"".join([cast("bytes", data) async for data in answer.body_iterator]))["data"]
        return Response(orjson.dumps({"object": "list", "data": cards}), media_type=_JSON)


def _send(handle: DeploymentHandle, call: Call) -> DeploymentResponseGenerator[Head | bytes]:
    return cast("DeploymentResponseGenerator[Head | bytes]", handle.send.remote(call))


async def _head(stream: DeploymentResponseGenerator[Head | bytes]) -> Head:
    head = await anext(stream)
    assert isinstance(head, Head)
    return head


async def _rest(stream: DeploymentResponseGenerator[Head | bytes]) -> bytes:
    return b"".join([data async for data in stream if isinstance(data, bytes)])


async def _pass_on(stream: DeploymentResponseGenerator[Head | bytes], head: Head, call: Call) -> AsyncIterator[bytes]:
    """Yield an answer's bytes; when the client goes, Serve cancels the replica's work for it."""
    try:
        async for data in stream:
            assert isinstance(data, bytes)
            yield data
    except (RayError, RayServeException):
        if not head.is_stream:
            raise
        yield broken_end(call, _LOST)


def _answer(head: Head, body: bytes | AsyncIterator[bytes]) -> Response:
    whole = isinstance(body, bytes)
    response = Response(body, head.status) if whole else StreamingResponse(body, head.status)
    lengths = [header for header in response.raw_headers if header[0] == b"content-length"]
    response.raw_headers = head.headers + lengths
    return response


def _unavailable(error: Exception) -> Response:
    body = unavailable_json(f"Not available: {type(error).__name__}.")
    return Response(body, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"}, media_type=_JSON)
