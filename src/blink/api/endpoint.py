# SPDX-License-Identifier: Apache-2.0
"""What an endpoint that takes a body is described by: a row of the table in endpoints.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from blink.api.http.errors import ErrorWriter, error_json
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.api.serving.session import BackgroundResponder, Session
from blink.api.serving.stream import EVENTS, Encoder, NonStreamingBody
from blink.link.client import RegionInfo
from blink.region.layout import Task
from blink.text.assets import ModelAssets


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How the answers of an endpoint that generates are written.

    stream and non_streaming: take the reply that the endpoint's `read` has made; stream is None where that cannot be.
    task: what the engine must be for. naming: lets errors name the fields that a client sent, where the request is
    carried out as another's. background: answers requests that run behind.
    """

    id_prefix: str
    stream: Callable[[Any, Session], Encoder] | None = None
    non_streaming: Callable[[Any, Session], NonStreamingBody]
    task: Task = Task.GENERATE
    naming: Callable[[], AbstractContextManager[None]] = nullcontext
    media_type: str = EVENTS  # of streams
    background: Callable[[Any, Session], BackgroundResponder] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint.

    main_field: what most of a body's work is about, for errors that nobody foresaw. read: what becomes of a checked
    body. writing: None if `read` has answered it. name and summary: what the API's description says. error_body: how
    its refusals are written, and those of paths below its own. aliases: other paths, for clients whose base URL lacks
    /v1.
    """

    kind: str
    path: str
    name: str
    summary: str
    body: Any
    main_field: str | None
    read: Callable[[Any, ModelAssets, Bounds, RegionInfo], ParsedRequest]
    writing: Writing | None = None
    error_body: ErrorWriter = error_json
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths at which the endpoint answers."""
        return (self.path, *self.aliases)
