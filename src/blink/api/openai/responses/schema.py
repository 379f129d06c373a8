# SPDX-License-Identifier: Apache-2.0
"""The body of POST /v1/responses, and the chat that it asks for. Nothing is stored: a request brings all its talk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from blink.api.http.errors import describe_validation
from blink.api.openai.schema import ChatBody, GenerationBody
from blink.api.serving.body import Body
from blink.errors import BadRequestError

Item = dict[str, Any]

# Where a chat's field comes from, for errors that name one.
_ORIGINS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "structured_outputs": "text",
    "reasoning_effort": "reasoning",
}
# Fields of a generation that this API names otherwise, or has not.
_OWN = {"model", "n", "stream_options", "min_tokens", "truncate_prompt_tokens"}
_PASSED = tuple(name for name in GenerationBody.model_fields if name not in _OWN)
_ROLES = ("user", "assistant", "system", "developer")
_STORELESS = "This server stores no responses: send the whole conversation as input."
# Field -> the values that ask for nothing, and why others are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), _STORELESS),
    "conversation": ((), _STORELESS),
    "previous_response_id": ((), _STORELESS),
    "prompt": ((), "This server stores no prompts: send instructions and input."),
    "truncation": (("disabled",), 'This server does not shorten conversations; set truncation to "disabled".'),
    "max_tool_calls": ((), "This server has no tools of its own, which max_tool_calls is about."),
}


class ResponsesBody(Body):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Item], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Any = None
    metadata: dict[str, str] | None = None
    user: Any = None
    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            for name in fields.keys() & _REFUSED.keys():
                allowed, reason = _REFUSED[name]
                if fields[name] is not None and fields[name] not in allowed:
                    raise BadRequestError(f"{name} is not supported. {reason}", name)
        return fields

    @model_validator(mode="after")
    def _read_chat(self) -> ResponsesBody:
        with naming_origins():
            try:
                self._chat = ChatBody.model_validate(self._chat_fields())
            except ValidationError as error:
                raise describe_validation(error.errors(include_url=False, include_input=False)) from None
        return self

    @property
    def chat(self) -> ChatBody:
        """Return the chat that is asked for."""
        return self._chat

    @property
    def echo(self) -> bytes:
        """Return what the response repeats of the request, as a JSON object."""
        repeated = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None, **(self.reasoning or {})},
            "text": {"format": {"type": "text"}, **(self.text or {})},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "user": self.user,
        }
        return orjson.dumps(repeated)

    def _chat_fields(self) -> dict[str, Any]:
        extra = self.model_extra or {}
        fields = {name: extra[name] for name in _PASSED if extra.get(name) is not None}
        included = self.include if isinstance(self.include, list) else ()
        if extra.get("top_logprobs") or "message.output_text.logprobs" in included:
            raise BadRequestError("Logprobs are not supported here; /v1/chat/completions has them.", "top_logprobs")
        fields |= {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "chat_template_kwargs": extra.get("chat_template_kwargs"),
        }
        if self.tool_choice == "auto" and not self.tools:
            fields["tool_choice"] = None  # what clients send by default
        return fields | _response_format((self.text or {}).get("format"))

    def _messages(self) -> list[Item]:
        messages: list[Item] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add_item(messages, item, f"input.{index}")
        return messages


@contextmanager
def naming_origins() -> Iterator[None]:
    """Let errors name the field of /v1/responses that the chat's field comes from."""
    try:
        yield
    except BadRequestError as error:
        raise BadRequestError(error.message, _ORIGINS.get(error.param or "", error.param)) from None


def _add_item(messages: list[Item], item: Item, place: str) -> None:
    """Append an item of the conversation; reasoning, text and calls that follow each other become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequestError(f"{place}.role must be one of {', '.join(_ROLES)}.", "input")
        if role == "assistant":
            _turn_for(messages, "content", "tool_calls")["content"] = item.get("content")
        else:
            messages.append({"role": role, "content": item.get("content")})
    elif kind == "function_call":
        _turn_for(messages).setdefault("tool_calls", []).append(_chat_call(item))
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        parts = item.get("content")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        text = "".join(text for text in texts if isinstance(text, str))
        _turn_for(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
    else:
        raise BadRequestError(f"{place}: items of type {str(kind)[:64]!r} are not supported.", "input")


def _turn_for(messages: list[Item], *later: str) -> Item:
    """Return the assistant's message that goes on, a new one if the last has one of these fields already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in later):
        messages.append({"role": "assistant"})
    return messages[-1]


def _chat_call(item: Item) -> Item:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _chat_tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise BadRequestError('Tools must be of type "function": this server has no tools of its own.', "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_chat_choice(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
