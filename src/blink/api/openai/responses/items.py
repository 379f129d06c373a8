# SPDX-License-Identifier: Apache-2.0
"""The output items of /v1/responses, built from the parts of a message, and the events that tell of their growth."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from blink.api.openai.message_body import new_call_id
from blink.text.message.parser import MessageForm
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reasoning

_ID_BYTES = 16
Event = tuple[str, dict[str, Any]]  # type and fields


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between items of text, of reasoning and of calls."""

    id_prefix: str
    event: str
    part: dict[str, Any] | None = None  # around the text; a call has none
    extra: dict[str, Any] = field(default_factory=dict[str, Any])  # of the events with text


_MESSAGE = _Kind(
    "msg_", "output_text", {"type": "output_text", "annotations": [], "logprobs": []}, extra={"logprobs": []}
)
_REASONING = _Kind("rs_", "reasoning_text", {"type": "reasoning_text"})
_CALL = _Kind("fc_", "function_call_arguments")


class _Item:
    """One item that grows."""

    def __init__(self, kind: _Kind, idx: int, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = {"id": kind.id_prefix + secrets.token_hex(_ID_BYTES), **fields, "status": "in_progress"}
        self.place: dict[str, Any] = {"item_id": self.fields["id"], "output_index": idx}
        if kind.part is not None:
            self.place["content_index"] = 0
        self._idx = idx
        self._texts: list[str] = []

    def open(self) -> list[Event]:
        """Return the events of the beginning."""
        events = [("response.output_item.added", {"output_index": self._idx, "item": dict(self.fields)})]
        if self.kind.part is not None:
            events.append(("response.content_part.added", {**self.place, "part": self._part("")}))
        return events

    def grow(self, text: str) -> Event:
        """Add text; return its event."""
        self._texts.append(text)
        return f"response.{self.kind.event}.delta", {**self.place, "delta": text, **self.kind.extra}

    def close(self, status: str) -> list[Event]:
        """Return the events of the end."""
        text, kind = "".join(self._texts), self.kind
        events: list[Event] = []
        if kind.part is None:
            self.fields["arguments"] = text
            done = {**self.place, "arguments": text, "name": self.fields["name"]}
            events.append((f"response.{kind.event}.done", done))
        else:
            self.fields["content"] = [self._part(text)]
            events.append((f"response.{kind.event}.done", {**self.place, "text": text, **kind.extra}))
            events.append(("response.content_part.done", {**self.place, "part": self._part(text)}))
        self.fields["status"] = status
        events.append(("response.output_item.done", {"output_index": self._idx, "item": self.fields}))
        return events

    def _part(self, text: str) -> dict[str, Any]:
        return {**(self.kind.part or {}), "text": text}


class OutputItems:
    """The items of one response."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._items: list[_Item] = []
        self._is_open = False

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the items as the response holds them."""
        return [item.fields for item in self._items]

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Take what the message has gained; return the events."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, CallOpened):
                index = sum(item.kind is _CALL for item in self._items)
                call = {"call_id": new_call_id(self._form, part.name, index), "name": part.name, "arguments": ""}
                events += self._begin(_CALL, {"type": "function_call", **call})
                continue
            kind = _kind_of(part)
            if not self._is_open or self._items[-1].kind is not kind:
                events += self._begin(kind, _EMPTY[kind.id_prefix])
                if self._form.uses_harmony:
                    part = part._replace(text=part.text.removeprefix("\n"))  # a chat's texts of one kind are one
            events.append(self._items[-1].grow(part.text))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that is open; return the events."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._items[-1].close(status)

    def _begin(self, kind: _Kind, fields: dict[str, Any]) -> list[Event]:
        events = self.close()
        self._items.append(_Item(kind, len(self._items), fields))
        self._is_open = True
        return events + self._items[-1].open()


_EMPTY: dict[str, dict[str, Any]] = {
    _MESSAGE.id_prefix: {"type": "message", "role": "assistant", "content": []},
    _REASONING.id_prefix: {"type": "reasoning", "summary": [], "content": []},
}


def _kind_of(part: Content | Reasoning | CallArguments) -> _Kind:
    if isinstance(part, CallArguments):
        return _CALL
    return _MESSAGE if isinstance(part, Content) else _REASONING
