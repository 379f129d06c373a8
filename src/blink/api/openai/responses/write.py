# SPDX-License-Identifier: Apache-2.0
"""The answers of /v1/responses: one object at the end, or the events of its making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from blink.api.openai.choices import usage_of
from blink.api.openai.logprobs import LogprobFormat
from blink.api.openai.responses.items import Event, OutputItems
from blink.api.openai.responses.tools import Origin
from blink.api.serving.growing_message import GrowingMessage
from blink.api.serving.reply import Reply
from blink.api.serving.response_store import IN_PROGRESS
from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.text.generation import Generation
from blink.text.message.parser import MessageForm
from blink.text.message.parts import Content

# What OpenAI's object has and this server's responses have but one of.
_FIXED: dict[str, Any] = {"service_tier": "default", "truncation": "disabled"}


@dataclass(slots=True, kw_only=True)
class ResponseReply(Reply):
    """The form of one response object."""

    echo: bytes  # what it repeats of its request, as JSON
    temperature: float = 1.0
    top_p: float = 1.0
    has_logprobs: bool = False
    shows_messages: bool = False  # the tokens of prompt and output
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])


class ResponseObject:
    """The one response of a session: its items, and the object that holds them."""

    def __init__(self, reply: ResponseReply, session: Session) -> None:
        self._reply = reply
        self._session = session
        form = reply.message or MessageForm()
        self._message = GrowingMessage(form, keeps_tokens=reply.shows_messages)
        tokenizer = reply.tokenizer if reply.has_logprobs else None
        self._logprobs = LogprobFormat(tokenizer, as_token_ids=False) if tokenizer is not None else None
        self._items = OutputItems(form, reply.origins)

    def take(self, generation: Generation) -> list[Event]:
        """Take what the reply has gained; return the events."""
        parts = self._message.take(generation)
        text = "".join(part.text for part in parts if isinstance(part, Content))
        if self._logprobs is not None and text:
            entries = self._logprobs.chat(self._message.logprobs)["content"]
            self._items.next_logprobs = _entries_of(text, entries)
        events = self._items.add(parts)
        if generation.finish_reason is not None:
            events += self._items.close("completed" if generation.finish_reason == "stop" else "incomplete")
        return events

    def encode(self) -> bytes:
        """Return the response object of a reply that has ended, and keep it if it shall be."""
        status = self.final_status
        data = self.encode_as(status)
        if self._reply.keeper is not None:
            self._reply.keeper.keep(status, data)
        return data

    def encode_as(self, status: str, error: BlinkError | None = None) -> bytes:
        """Return the response object as it is now."""
        reply, has_ended = self._reply, status in ("completed", "incomplete")
        fields: dict[str, Any] = {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "model": reply.model,
            "output": self._items.items if has_ended else [],
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "temperature": reply.temperature,
            "top_p": reply.top_p,
            "usage": self._usage() if has_ended else None,
            "store": reply.keeper is not None,
            "error": {"code": "server_error", "message": error.message} if error is not None else None,
        }
        if has_ended and reply.shows_messages:
            fields |= self._raw_messages()
        return orjson.dumps(fields | _FIXED)[:-1] + b"," + reply.echo[1:]

    @property
    def final_status(self) -> str:
        """Return how a response whose reply has ended is to be called."""
        return "incomplete" if self._session.generations[0].finish_reason == "length" else "completed"

    def _raw_messages(self) -> dict[str, Any]:
        tokenizer = self._reply.tokenizer
        assert tokenizer is not None
        prompt = self._session.prompts[0].tokens.tolist()
        return {
            name: [
                {
                    "type": "raw_message_tokens",
                    "message": tokenizer.decode(tokens, skip_special_tokens=False),
                    "tokens": tokens,
                }
            ]
            for name, tokens in (("input_messages", prompt), ("output_messages", self._message.tokens))
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._session.prompts, self._session.generations, 1)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._message.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _entries_of(text: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last entries, which a text is made of; those of marks that were read before it are others'."""
    num_bytes, place = len(text.encode()), len(entries)
    while place and num_bytes > 0:
        place -= 1
        num_bytes -= len(entries[place]["bytes"])
    return entries[place:]


class ResponseEncoder:
    """Encode the events of one streamed response."""

    def __init__(self, reply: ResponseReply, session: Session) -> None:
        self._response = ResponseObject(reply, session)
        self._num_events = 0

    def encode(self, generation: Generation) -> bytes:
        """Return the events of what the reply has gained; the first time behind those of the beginning."""
        begun = b""
        if not self._num_events:
            response = self._response.encode_as(IN_PROGRESS)
            begun = self._encode_response("response.created", response)
            begun += self._encode_response("response.in_progress", response)
        return begun + b"".join([self._encode_event(*event) for event in self._response.take(generation)])

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last event."""
        if error is not None:
            told = {"code": error.type, "message": error.message, "param": error.param}
            return self._encode_event("error", told)
        return self._encode_response(f"response.{self._response.final_status}", self._response.encode())

    def _encode_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, **fields, "sequence_number": self._next()})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _encode_response(self, kind: str, response: bytes) -> bytes:
        head = orjson.dumps({"type": kind, "sequence_number": self._next()})[:-1]
        return b'event: %b\ndata: %b,"response":%b}\n\n' % (kind.encode(), head, response)

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1
