# SPDX-License-Identifier: Apache-2.0
"""The output items of /v1/responses, built from the parts of a message, and the events that tell of their growth."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blink.api.openai.message_body import new_call_id
from blink.api.openai.responses.tools import Origin
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
    text: str = "text"  # the name of the text
    has_logprobs: bool = False


_MESSAGE = _Kind("msg_", "output_text", {"type": "output_text", "annotations": []}, has_logprobs=True)
_REASONING = _Kind("rs_", "reasoning_text", {"type": "reasoning_text"})
_CALL = _Kind("fc_", "function_call_arguments", text="arguments")
_CUSTOM = _Kind("ctc_", "custom_tool_call_input", text="input")


class _Item:
    """One item that grows."""

    def __init__(self, kind: _Kind, idx: int, fields: dict[str, Any], origin: Origin | None = None) -> None:
        self.kind = kind
        self._origin = origin
        self.fields = {"id": kind.id_prefix + secrets.token_hex(_ID_BYTES), **fields, "status": "in_progress"}
        self.place: dict[str, Any] = {"item_id": self.fields["id"], "output_index": idx}
        if kind.part is not None:
            self.place["content_index"] = 0
        self._idx = idx
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> list[Event]:
        """Return the events of the beginning."""
        events = [("response.output_item.added", {"output_index": self._idx, "item": dict(self.fields)})]
        if self.kind.part is not None:
            events.append(("response.content_part.added", {**self.place, "part": self._part("")}))
        return events

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add text; return its events."""
        self._texts.append(text)
        self._logprobs += logprobs
        if self.kind is _CUSTOM:  # the text is known when the argument that holds it has ended
            return []
        return [(f"response.{self.kind.event}.delta", {**self.place, "delta": text, **self._extra(logprobs)})]

    def close(self, status: str) -> list[Event]:
        """Return the events of the end."""
        text, kind = "".join(self._texts), self.kind
        events: list[Event] = []
        if kind is _CUSTOM and self._origin is not None:
            text = self._origin.text_of(text)
            events.append((f"response.{kind.event}.delta", {**self.place, "delta": text}))
        done = {**self.place, kind.text: text, **self._extra(self._logprobs)}
        if kind is _CALL:
            done["name"] = self.fields["name"]
        events.append((f"response.{kind.event}.done", done))
        if kind.part is None:
            self.fields[kind.text] = text
        else:
            self.fields["content"] = [self._part(text)]
            events.append(("response.content_part.done", {**self.place, "part": self._part(text)}))
        self.fields["status"] = status
        events.append(("response.output_item.done", {"output_index": self._idx, "item": self.fields}))
        return events

    def _part(self, text: str) -> dict[str, Any]:
        return {**(self.kind.part or {}), **self._extra(self._logprobs), "text": text}

    def _extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": [*logprobs]} if self.kind.has_logprobs else {}


class OutputItems:
    """The items of one response."""

    def __init__(self, form: MessageForm, origins: Mapping[str, Origin]) -> None:
        self._form = form
        self._origins = origins
        self.next_logprobs: list[dict[str, Any]] = []  # of the text that is added next
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
                events += self._begin_call(part.name)
                continue
            kind = _kind_of(part)
            is_call = kind is _CALL
            if not is_call and (not self._is_open or self._items[-1].kind is not kind):
                events += self._begin(kind, _EMPTY[kind.id_prefix])
                if self._form.uses_harmony:
                    part = part._replace(text=part.text.removeprefix("\n"))  # a chat's texts of one kind are one
            logprobs: list[dict[str, Any]] = []
            if kind is _MESSAGE:
                logprobs, self.next_logprobs = self.next_logprobs, []
            events += self._items[-1].grow(part.text, logprobs)
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that is open; return the events."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._items[-1].close(status)

    def _begin_call(self, name: str) -> list[Event]:
        origin = self._origins.get(name) or Origin(name)
        kind, named = (_CUSTOM, "custom_tool_call") if origin.is_custom else (_CALL, "function_call")
        index = sum(item.kind in (_CALL, _CUSTOM) for item in self._items)
        call_id = new_call_id(self._form, name, index)
        call = {"type": named, "call_id": call_id, **origin.fields, kind.text: ""}
        return self._begin(kind, call, origin)

    def _begin(self, kind: _Kind, fields: dict[str, Any], origin: Origin | None = None) -> list[Event]:
        events = self.close()
        self._items.append(_Item(kind, len(self._items), fields, origin))
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
