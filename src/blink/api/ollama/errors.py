# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of Ollama's API: {"error": "..."}."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager

from blink.api.http.errors import renaming, with_field
from blink.api.openai.ggml_options import FIELD_ORIGINS

# Where a field of a chat or a completion comes from.
_ORIGINS = {
    **FIELD_ORIGINS,
    "max_tokens": "num_predict",
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}


def write_error(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """Return the body of an error; the message names the field, which this form has no place for."""
    del kind, code  # the status tells both
    # json, not orjson: a message may quote lone surrogates from the request.
    return json.dumps({"error": with_field(message, param)}).encode()


def naming_origins() -> AbstractContextManager[None]:
    """Let errors name the field of Ollama's API that a field comes from."""
    return renaming(_ORIGINS)
