# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from blink.api.http.errors import kind_of, renaming, with_field
from blink.errors import BadRequestError, PromptTooLongError

_ID_BYTES = 12
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
# Where a chat's field comes from.
_ORIGINS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "structured_outputs": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}


def write_error(message: str, kind: str, code: int, param: str | None = None, request_id: str = "") -> bytes:
    """Return the body of an error; the message names the field, which this form has no place for."""
    del kind  # the status tells it
    error = {"type": kind_of(code, _TYPES, "api_error"), "message": with_field(message, param)}
    request_id = request_id or f"req_{secrets.token_hex(_ID_BYTES)}"
    # json, not orjson: a message may quote lone surrogates from the request.
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()


@contextmanager
def naming_origins() -> Iterator[None]:
    """Let errors name the field of a message that the chat's field comes from, and say what clients look for."""
    with renaming(_ORIGINS):
        try:
            yield
        except PromptTooLongError as error:
            raise BadRequestError(_tell_length(error)) from None


def _tell_length(error: PromptTooLongError) -> str:
    """Return Anthropic's own words: by them a client shortens the conversation, or asks for fewer tokens."""
    if not error.token_limit:
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_model_len} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.num_tokens} + {error.token_limit} >"
        f" {error.max_model_len}, decrease input length or `max_tokens` and try again"
    )
