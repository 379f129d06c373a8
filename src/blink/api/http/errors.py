# SPDX-License-Identifier: Apache-2.0
"""Errors as the API shows them: vLLM's body {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from blink.errors import BadRequestError, BlinkError

ErrorWriter = Callable[[str, str, int, str | None], bytes]  # of a message, the error's type, the status and the field
WriterOf = Callable[[str], ErrorWriter]  # of a path

_MAX_VALIDATION_ERRORS = 10
_MAX_PLACE_CHARS = 64
_RETRY_SECONDS = "1"
_RETRIED = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


def error_json(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """Return the body of an error."""
    # json, not orjson: a message may quote lone surrogates from the request.
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def blink_error_json(error: BlinkError) -> bytes:
    """Return the body of one of Blink's own errors."""
    return error_json(error.message, error.type, int(error.status), error.param)


def with_field(message: str, param: str | None) -> str:
    """Return an error's message that names the field, for forms of errors that have no place for it."""
    return f"{param}: {message}" if param and param not in message else message


def kind_of(code: int, kinds: Mapping[int, str], of_server: str) -> str:
    """Return what another API calls an error with a status: by its table, else a client's fault or the server's."""
    usual = of_server if code >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return kinds.get(code, usual)


@contextmanager
def renaming(origins: Mapping[str, str]) -> Iterator[None]:
    """Let errors of a chat or completion name the fields of another API that it was made of.

    origins: field of the chat or completion -> the field that it comes from.
    """
    try:
        yield
    except ValidationError as error:
        found = describe_validation(error.errors(include_url=False, include_input=False))
        raise _renamed(found, origins) from None
    except BadRequestError as error:
        raise _renamed(error, origins) from None


def _renamed(error: BadRequestError, origins: Mapping[str, str]) -> BadRequestError:
    return BadRequestError(error.message, origins.get(error.param or "", error.param))


def install_error_responses(app: FastAPI, writer_of: WriterOf) -> None:
    """Answer every error in the form of the API that its path belongs to."""

    async def on_blink_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BlinkError)
        return error_response(error, writer_of(request.url.path))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(describe_validation(error.errors()), writer_of(request.url.path))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_error_response(error, writer_of(request.url.path))

    async def on_bug(request: Request, error: Exception) -> Response:
        return bug_response(error, writer_of(request.url.path))

    app.add_exception_handler(BlinkError, on_blink_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def error_response(error: BlinkError, write: ErrorWriter = error_json) -> Response:
    """Return the response for one of Blink's own errors."""
    headers = {"Retry-After": _RETRY_SECONDS} if error.status in _RETRIED else None
    return _respond(write(error.message, error.type, int(error.status), error.param), error.status, headers)


def http_error_response(error: HTTPException, write: ErrorWriter = error_json) -> Response:
    """Return the response for an error of the framework's."""
    kind = HTTPStatus(error.status_code).phrase
    return _respond(write(str(error.detail), kind, error.status_code, None), error.status_code, error.headers)


def bug_response(error: Exception, write: ErrorWriter = error_json) -> Response:
    """Return the response for an error that nobody expected."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return _respond(write(f"Internal error: {type(error).__name__}.", BlinkError.type, status, None), status, None)


def refuse(status: HTTPStatus, message: str, write: ErrorWriter = error_json) -> Response:
    """Return the response to what does not get as far as a route."""
    return _respond(write(message, status.phrase, status, None), status, None)


def describe_validation(errors: Any) -> BadRequestError:
    """Put pydantic's errors into one; none of them quotes the request's text."""
    shown = [f"{_place(item['loc'])}: {item['msg']}" for item in errors[:_MAX_VALIDATION_ERRORS]]
    if len(errors) > _MAX_VALIDATION_ERRORS:
        shown.append(f"and {len(errors) - _MAX_VALIDATION_ERRORS} more errors")
    named = [str(part)[:_MAX_PLACE_CHARS] for part in errors[0]["loc"] if part != "body"] if errors else []
    return BadRequestError("; ".join(shown), named[0] if named else None)


def _place(location: tuple[str | int, ...]) -> str:
    # A place may be a name that the client chose.
    return ".".join(str(part)[:_MAX_PLACE_CHARS] for part in location if part != "body") or "body"


def _respond(body: bytes, status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(body, int(status), headers, media_type="application/json")
