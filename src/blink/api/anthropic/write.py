# SPDX-License-Identifier: Apache-2.0
"""The answers of /v1/messages: one message at the end, or the events of its making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from blink.api.anthropic.content import ContentBlocks, Event
from blink.api.anthropic.errors import write_error
from blink.api.serving.growing_message import GrowingMessage
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.text.generation import Generation
from blink.text.message.parser import MessageForm

ID_PREFIX = "msg_"


@dataclass(slots=True, kw_only=True)
class MessageReply(Reply):
    """The form of one message."""

    shows_thinking: bool = True  # else its blocks of reasoning are empty


class MessageObject:
    """The one answer of a session: its blocks, and the message that holds them."""

    def __init__(self, reply: MessageReply, session: Session) -> None:
        self._reply = reply
        self._session = session
        form = reply.message or MessageForm()
        self._message = GrowingMessage(form)
        self._content = ContentBlocks(form, shows_thinking=reply.shows_thinking)

    def take(self, generation: Generation) -> list[Event]:
        """Take what the output has gained; return the events."""
        events = self._content.add(self._message.take(generation))
        if generation.finish_reason is not None:
            events += self._content.close()
        return events

    def encode(self) -> bytes:
        """Return the message when its output has ended."""
        return orjson.dumps(self.head | {"content": self._content.blocks, **self.stop, "usage": self.usage})

    @property
    def head(self) -> dict[str, Any]:
        """Return the message as it begins."""
        return {
            "id": self._reply.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._input_usage | {"output_tokens": 0, "service_tier": "standard"},
        }

    @property
    def stop(self) -> dict[str, Any]:
        """Return why the output has ended."""
        generation = self._session.generations[0]
        sequence = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        if generation.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._message.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def usage(self) -> dict[str, Any]:
        """Return what the message has taken."""
        return self._input_usage | {
            "output_tokens": self._session.generations[0].num_tokens,
            "output_tokens_details": {"thinking_tokens": self._message.reasoning_tokens},
            "service_tier": "standard",
        }

    @property
    def _input_usage(self) -> dict[str, Any]:
        cached = self._session.generations[0].cached_tokens
        return {
            "input_tokens": self._session.prompts[0].num_tokens - cached,  # those that had to be computed
            "cache_creation_input_tokens": 0,  # what is cached anyway is no extra
            "cache_read_input_tokens": cached,
        }


class MessageEncoder:
    """Encode the events of one streamed message."""

    def __init__(self, reply: MessageReply, session: Session) -> None:
        self._message = MessageObject(reply, session)
        self._request_id = f"req_{reply.id.removeprefix(ID_PREFIX)}"
        self._has_begun = False

    def encode(self, generation: Generation) -> bytes:
        """Return the events of what the output has gained; the first time behind those of the beginning."""
        events = self._message.take(generation)
        if not self._has_begun:
            self._has_begun = True
            events = [{"type": "message_start", "message": self._message.head}, {"type": "ping"}, *events]
        return _encode(events)

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last events."""
        if error is not None:
            body = write_error(error.message, error.type, int(error.status), error.param, self._request_id)
            return b"event: error\ndata: %b\n\n" % body
        usage = {name: value for name, value in self._message.usage.items() if name != "service_tier"}
        return _encode(
            [{"type": "message_delta", "delta": self._message.stop, "usage": usage}, {"type": "message_stop"}]
        )


def _encode(events: Iterable[Event]) -> bytes:
    return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events])
