# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a request's body to checked fields and tokens: all of a request's work that grows with its body.

It needs no event loop and no engine, so that a process of its own does it for large bodies (blink.api.reader).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from blink.api.endpoints import ENDPOINTS
from blink.api.http.errors import describe_validation
from blink.api.http.json_body import parse_body
from blink.api.serving.body import Body, own_error
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError, BlinkError, NotFoundError
from blink.request.vectors import refusal_of
from blink.text.assets import ModelAssets
from blink.text.json_weight import weigh_json

# What is read at once rather than in another process, which takes longer by two waits for a core: some milliseconds of
# work at the worst, of which tokenizing has the most.
LIGHT_BYTES = 8 << 10
_LIGHT_BYTES_OF_IDS = 128 << 10
_LIGHT_CONTAINERS, _LIGHT_ITEMS, _LIGHT_TEXT = 64, 16 << 10, 16 << 10

logger = logging.getLogger(__name__)


def read_body(kind: str, data: bytes | bytearray, assets: ModelAssets, bounds: Bounds) -> ParsedRequest:
    """Parse and check a body, and tokenize its texts.

    Raises:
        BlinkError: the request is refused.
    """
    try:
        return _read(kind, data, assets, bounds)
    except BlinkError:
        raise
    except ValidationError as error:
        raise own_error(error) or describe_validation(error.errors(include_url=False, include_input=False)) from None
    except MemoryError:
        raise BadRequestError("The body takes too much memory to read.") from None
    except Exception as error:  # a fault of this server's, which this body alone brings about
        logger.exception("a body could not be read")
        field = ENDPOINTS[kind].main_field
        raise BadRequestError(f"{field or 'The body'} cannot be read: {type(error).__name__}.", field) from None


def _read(kind: str, data: bytes | bytearray, assets: ModelAssets, bounds: Bounds) -> ParsedRequest:
    context = bounds.engine.max_model_len if bounds.engine is not None else 0
    body = _adapter_of(kind).validate_python(parse_body(data, context))
    assert isinstance(body, Body)
    if bounds.engine is None:
        return ParsedRequest(model=body.model, has_engine=False)
    if body.model and bounds.model_names:
        body.model = body.model_among(bounds.model_names)
        if body.model and body.model not in bounds.model_names:
            raise NotFoundError(f"The model `{body.model}` does not exist.", "model")
    endpoint = ENDPOINTS[kind]
    if endpoint.writing is not None and (refusal := refusal_of(endpoint.writing.task, bounds.engine.task)):
        raise NotFoundError(refusal)
    return endpoint.read(body, assets, bounds, bounds.engine)


@cache
def _adapter_of(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(ENDPOINTS[kind].body)


def is_light(data: bytes | bytearray) -> bool:
    """Say whether reading a body takes a moment only, whatever it asks for: thousands of token ids, or some pages."""
    if len(data) <= LIGHT_BYTES:
        return True
    if len(data) > _LIGHT_BYTES_OF_IDS:
        return False
    weight = weigh_json(data)
    return weight.containers <= _LIGHT_CONTAINERS and weight.items <= _LIGHT_ITEMS and weight.text_bytes <= _LIGHT_TEXT
