# SPDX-License-Identifier: Apache-2.0
"""Checks of single fields that several bodies have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.errors import BadRequestError
from blink.sampling_params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS, MAX_STOPS

_MAX_LENGTHS = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKENS // 2,
    "logit_bias": MAX_LOGIT_BIASES,
    "bad_words": MAX_LOGIT_BIASES,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "logprob_token_ids": MAX_LOGPROBS,
}


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Refuse long lists before each of their items is checked.

    Raises:
        BadRequestError: one is too long.
    """
    if _MAX_LENGTHS.keys().isdisjoint(fields):  # as in most bodies
        return
    for name, limit in _MAX_LENGTHS.items():
        value = fields.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise BadRequestError(f"{name} must be at most {limit} entries, got {len(value)}.", name)


def check_printable(text: str) -> str:
    """Refuse a request's id that would not be one line of a log.

    Raises:
        BadRequestError: it would not.
    """
    if not text.isprintable():
        raise BadRequestError("request_id must hold printable characters only.", "request_id")
    return text
