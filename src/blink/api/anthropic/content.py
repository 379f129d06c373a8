# SPDX-License-Identifier: Apache-2.0
"""The content blocks of an answer, built from the parts of a message, and the events that tell of their growth."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from blink.api.serving.growing_message import read_arguments
from blink.text.message.parser import MessageForm
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reasoning

_ID_BYTES = 12
Event = dict[str, Any]

# Of a part -> how a delta of its block is called, and the name of what the delta brings.
_DELTAS: dict[type[Part], tuple[str, str]] = {
    Content: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    CallArguments: ("input_json_delta", "partial_json"),
}


class _Block:
    """One block that grows."""

    def __init__(self, kind: type[Part], idx: int, fields: dict[str, Any]) -> None:
        self.kind = kind
        self._idx = idx
        self._fields = fields
        self._texts: list[str] = []

    @property
    def fields(self) -> dict[str, Any]:
        """Return the block as the answer holds it."""
        text = "".join(self._texts)
        if self.kind is CallArguments:
            return {**self._fields, "input": read_arguments(text)}
        if self.kind is Reasoning:
            return {**self._fields, "thinking": text}
        return {**self._fields, "text": text}

    def open(self) -> Event:
        """Return the event of the beginning, in which a block is empty."""
        fields = {**self._fields, "signature": ""} if self.kind is Reasoning else self._fields
        return {"type": "content_block_start", "index": self._idx, "content_block": fields}

    def grow(self, text: str) -> Event:
        """Add text; return its event."""
        self._texts.append(text)
        return self._delta(*_DELTAS[self.kind], text)

    def close(self) -> list[Event]:
        """Return the events of the end."""
        signed = self.kind is Reasoning
        events = [self._delta("signature_delta", "signature", self._fields["signature"])] if signed else []
        return [*events, {"type": "content_block_stop", "index": self._idx}]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._idx, "delta": {"type": kind, name: text}}


class ContentBlocks:
    """The blocks of one answer."""

    def __init__(self, form: MessageForm, *, shows_thinking: bool) -> None:
        self._form = form
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._is_open = False

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """Return the blocks as the answer holds them."""
        return [block.fields for block in self._blocks]

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Take what the message has gained; return the events."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, CallOpened):
                call = {"id": f"toolu_{secrets.token_hex(_ID_BYTES)}", "name": part.name, "input": {}}
                events += self._begin(CallArguments, {"type": "tool_use", **call})
                continue
            text = part.text
            if not self._is_open or self._blocks[-1].kind is not type(part):
                events += self._begin(type(part), _empty_block(part))
                if self._form.uses_harmony:
                    text = text.removeprefix("\n")  # a chat's texts of one kind are one
            if text and (self._shows_thinking or not isinstance(part, Reasoning)):
                events.append(self._blocks[-1].grow(text))
        return events

    def close(self) -> list[Event]:
        """End the block that is open; return the events."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._blocks[-1].close()

    def _begin(self, kind: type[Part], fields: dict[str, Any]) -> list[Event]:
        events = self.close()
        self._blocks.append(_Block(kind, len(self._blocks), fields))
        self._is_open = True
        return [*events, self._blocks[-1].open()]


def _empty_block(part: Content | Reasoning | CallArguments) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        # Clients send it back with the block; it need not prove anything, as the text is taken as it comes.
        return {"type": "thinking", "thinking": "", "signature": secrets.token_hex(_ID_BYTES)}
    return {"type": "text", "text": ""}
