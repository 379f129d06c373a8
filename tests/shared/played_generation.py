# SPDX-License-Identifier: Apache-2.0
"""What a client reads of a generation that a test plays: the events of a stream, or the whole body."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from blink.api.anthropic.write import MessageReply
from blink.api.endpoint import Writing
from blink.api.endpoints import ENDPOINTS
from blink.api.openai.choices import ChoicesReply
from blink.api.openai.responses.write import ResponseReply
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.api.serving.stream import Encoder
from blink.text.generation import Generation


def reply_of(**fields: Any) -> Reply:
    """Return the form of a response, if the fields have an echo, of a message, if they may hide thoughts, or a chat."""
    named: dict[str, Any] = {"id": "x", "created": 1, "model": "m", **fields}
    if "echo" in fields:
        return ResponseReply(**named)
    return MessageReply(**named) if "shows_thinking" in fields else ChoicesReply(is_chat=True, **named)


class PlayedGeneration(ABC):
    """One generation, whose tokens come as the test says, and how it is told."""

    generation: Generation
    _reply: Reply
    _session: Session

    @property
    def _writing(self) -> Writing:
        kinds: dict[type[Reply], str] = {ResponseReply: "responses", MessageReply: "messages", ChoicesReply: "chat"}
        writing = ENDPOINTS[kinds[type(self._reply)]].writing
        assert writing is not None
        return writing

    @abstractmethod
    def _steps(self) -> Iterator[None]:
        """Add the tokens of one step after the other."""

    def encoder(self) -> Encoder:
        """Return what writes a stream."""
        stream = self._writing.stream
        assert stream is not None
        return stream(self._reply, self._session)

    def stream(self) -> list[dict[str, Any]]:
        """Return the JSON of all events."""
        encoder = self.encoder()
        data = b"".join([encoder.encode(self.generation) for _ in self._steps()]) + encoder.encode_end(None)
        lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ") and line != b"data: [DONE]"]
        return [json.loads(line) for line in lines]

    def whole(self) -> dict[str, Any]:
        """Return the JSON of the whole body."""
        body = self._writing.non_streaming(self._reply, self._session)
        for _ in self._steps():
            body.take(self.generation)
        return json.loads(body.encode())
