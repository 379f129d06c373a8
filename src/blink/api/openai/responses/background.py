# SPDX-License-Identifier: Apache-2.0
"""Responses that are answered at once and made afterwards: the client asks for them by their id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from blink.api.openai.responses.write import ResponseObject, ResponseReply
from blink.api.serving.session import Session
from blink.errors import BlinkError, ClientGoneError
from blink.text.generation import Generation

_LOOK_SECONDS = 0.5
_BEGUN = "queued"  # as vLLM and OpenAI say at first


class BackgroundResponse:
    """Make one response; its client may cancel or delete it at any worker, so the store is asked from time to time."""

    def __init__(self, reply: ResponseReply, session: Session) -> None:
        assert reply.keeper is not None
        self._keeper = reply.keeper
        self._session = session
        self._response = ResponseObject(reply, session)
        self.begun = self._response.encode_as(_BEGUN)
        self._keeper.begin(self.begun)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def update(self, generations: Sequence[Generation]) -> None:
        """Take what the output has gained."""
        for generation in generations:
            self._response.take(generation)

    def close(self, error: BlinkError | None) -> None:
        """Keep what has become of it."""
        self._timer.cancel()
        if error is None:
            status = self._response.final_status
            self._keeper.settle(status, self._response.encode_as(status))
        elif not isinstance(error, ClientGoneError):
            self._keeper.settle("failed", self._response.encode_as("failed", error))

    def _look(self) -> None:
        if self._keeper.is_wanted:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        else:
            self._session.fail(ClientGoneError(), "abort")
