# SPDX-License-Identifier: Apache-2.0
"""What the log says of each request, where it is asked to (--enable-log-requests)."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from blink.api.serving.parsed_request import ParsedRequest
from blink.api.serving.session import Session
from blink.errors import BlinkError, ClientGoneError

logger = logging.getLogger(__name__)


def log_begin(reply_id: str, session: Session, parsed: ParsedRequest) -> None:
    """Write what a request asks for."""
    num_tokens = sum(prompt.num_tokens for prompt in session.prompts)
    logger.info("request %s: %d prompt tokens, %s", reply_id, num_tokens, parsed.shown)


def log_end(reply_id: str, session: Session, error: BlinkError | None) -> None:
    """Write how a request ended; a client that left is no error."""
    if isinstance(error, ClientGoneError):
        error, status = None, ClientGoneError.status
    else:
        status = HTTPStatus.OK if error is None else error.status
    fields = {
        "request_id": reply_id,
        "seconds": round(time.perf_counter() - session.arrived, 6),
        "prompt_tokens": sum(prompt.num_tokens for prompt in session.prompts),
        "completion_tokens": sum(generation.num_tokens for generation in session.generations),
        "finish_reasons": [generation.finish_reason for generation in session.generations],
        "status": int(status),
        "error": error.message if error is not None else None,
    }
    text = "request {request_id} ended after {seconds:.3f} s: {prompt_tokens} prompt tokens, {completion_tokens} tokens"
    reasons = [generation.finish_reason or "abort" for generation in session.generations]
    how = error.message if error is not None else ", ".join(reasons)
    logger.info("%s: %s", text.format(**fields), how, extra={"fields": fields})
