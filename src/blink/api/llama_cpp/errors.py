# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of llama.cpp's server: {"error": {"code", "message", "type"}}."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from http import HTTPStatus

from blink.api.http.errors import kind_of, renaming, with_field
from blink.api.openai.ggml_options import FIELD_ORIGINS

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
    error = {"code": int(code), "message": with_field(message, param), "type": kind_of(code, _TYPES, "server_error")}
    # json, not orjson: a message may quote lone surrogates from the request.
    return json.dumps({"error": error}).encode()


def naming_origins() -> AbstractContextManager[None]:
    """Let errors name the field of llama.cpp's API that a completion's field comes from."""
    return renaming(_ORIGINS)
