# SPDX-License-Identifier: Apache-2.0
"""The bodies of POST /v1/responses and /v1/responses/input_tokens, and the chat that they ask for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from blink.api.http.errors import renaming
from blink.api.openai.responses.talk import add_item
from blink.api.openai.responses.tools import Item, Origin, chat_choice, read_tools
from blink.api.openai.schema import ChatBody, GenerationBody
from blink.api.serving.body import Body
from blink.errors import BadRequestError
from blink.sampling_params import MAX_LOGPROBS

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
_STORELESS = "This server stores no conversations: send previous_response_id, or all as input."
_LOGPROBS = "message.output_text.logprobs"
# Field -> the values that ask for nothing, and why others are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), _STORELESS),
    "prompt": ((), "This server stores no prompts: send instructions and input."),
    "use_beam_search": ((False,), "Completions and chats have beam search."),
    "truncation": (("disabled",), 'This server does not shorten conversations; set truncation to "disabled".'),
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
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    enable_response_messages: bool = False
    max_tool_calls: int | None = None  # of tools that this server has none of
    _chat: ChatBody = PrivateAttr()
    _origins: dict[str, Origin] = PrivateAttr()
    _history: list[Item] = PrivateAttr(default_factory=list[Item])

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
    def _check_background(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise BadRequestError(
                "background can only be used when `store` is true: the response is fetched later.", "background"
            )
        if self.background and (self.model_extra or {}).get("stream"):
            raise BadRequestError("background cannot be combined with stream: fetch the response by its id.", "stream")
        return self

    @model_validator(mode="after")
    def _read_chat(self) -> ResponsesBody:
        self._make_chat()
        return self

    def _make_chat(self) -> None:
        functions, self._origins = read_tools(self.tools or ())
        with naming_origins():
            self._chat = ChatBody.model_validate(self._chat_fields(functions))

    @property
    def chat(self) -> ChatBody:
        """Return the chat that is asked for."""
        return self._chat

    @property
    def origins(self) -> dict[str, Origin]:
        """Return what functions of the chat stand for that are no functions by themselves."""
        return self._origins

    @property
    def items(self) -> list[Item]:
        """Return the whole conversation."""
        if isinstance(self.input, str):
            return [*self._history, {"type": "message", "role": "user", "content": self.input}]
        return [*self._history, *self.input]

    def go_on_behind(self, history: list[Item]) -> None:
        """Put earlier items before those of the request.

        Raises:
            BadRequestError: together they are no conversation.
        """
        self._history = history
        self._make_chat()

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
            "background": bool(self.background),
            "max_tool_calls": self.max_tool_calls,
            "previous_response_id": self.previous_response_id,
            "top_logprobs": self.top_logprobs or 0,
        }
        return orjson.dumps(repeated)

    def _chat_fields(self, functions: list[Item]) -> dict[str, Any]:
        extra = self.model_extra or {}
        fields = {name: extra[name] for name in _PASSED if extra.get(name) is not None}
        if isinstance(self.include, list) and _LOGPROBS in self.include:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        elif self.top_logprobs:
            raise BadRequestError(f"top_logprobs needs {_LOGPROBS!r} in include.", "top_logprobs")
        fields |= {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": functions or None,
            "tool_choice": chat_choice(self.tool_choice),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "chat_template_kwargs": extra.get("chat_template_kwargs"),
        }
        if self.tool_choice == "auto" and not functions:
            fields["tool_choice"] = None  # what clients send by default
        return fields | _response_format((self.text or {}).get("format"))

    def _messages(self) -> list[Item]:
        messages: list[Item] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(self.items):
            add_item(messages, item, f"input.{index - len(self._history)}")
        return messages


def naming_origins() -> AbstractContextManager[None]:
    """Let errors name the field of /v1/responses that the chat's field comes from."""
    return renaming(_ORIGINS)


def _response_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class InputTokensBody(ResponsesBody):
    """POST /v1/responses/input_tokens."""
