# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of llama.cpp's server: {"error": {"code", "message", "type"}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from blink.api.openai.ggml_options import FIELD_ORIGINS
from blink.errors import BadRequestError

_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "unavailable_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable_error",
}
_ORIGINS = {
    **FIELD_ORIGINS,
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "suffix": "input_suffix",
    "response_format": "json_schema",
    "structured_outputs": "grammar",
}


def write_error(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """Return the body of an error; the message names the field, which this form has no place for."""
    del kind  # the status tells it
    text = f"{param}: {message}" if param and param not in message else message
    # json, not orjson: a message may quote lone surrogates from the request.
    return json.dumps({"error": {"code": int(code), "message": text, "type": _type_of(code)}}).encode()


def _type_of(code: int) -> str:
    if code in _TYPES:
        return _TYPES[code]
    return "server_error" if code >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


@contextmanager
def naming_origins() -> Iterator[None]:
    """Let errors name the field of llama.cpp's API that a completion's field comes from."""
    try:
        yield
    except BadRequestError as error:
        raise BadRequestError(error.message, _ORIGINS.get(error.param or "", error.param)) from None
