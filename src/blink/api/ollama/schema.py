# SPDX-License-Identifier: Apache-2.0
"""The bodies of POST /api/chat, /api/generate and /api/show, and the chat or completion that they ask for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, StrictBool, model_validator

from blink.api.ollama.errors import naming_origins
from blink.api.ollama.messages import OllamaMessage, chat_messages, refuse_images
from blink.api.openai.ggml_options import is_known, read_options
from blink.api.openai.schema import ChatBody, CompletionBody
from blink.api.serving.body import Body
from blink.errors import BadRequestError

_LATEST = ":latest"  # what Ollama's clients put behind a name without a tag


class NamedBody(Body):
    """A body whose model may have a tag."""

    def model_among(self, names: Collection[str]) -> str | None:
        """Return the model that is asked for; without its tag, if no model has it."""
        if self.model is None or self.model in names:
            return self.model
        return self.model.removesuffix(_LATEST)


class ShowBody(NamedBody):
    """POST /api/show. name: an older name of model."""

    name: str | None = None
    verbose: bool | None = None

    @model_validator(mode="after")
    def _read_name(self) -> ShowBody:
        self.model = self.model or self.name
        return self


class GenerationBody(NamedBody):
    """What chats and completions share. keep_alive, truncate, shift: taken, and without effect."""

    stream: StrictBool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    think: StrictBool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    images: list[Any] | None = None
    _asked: ChatBody | CompletionBody | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read_request(self) -> GenerationBody:
        refuse_images(self.images)
        for name in self.options or ():
            if not is_known(name):
                raise BadRequestError(f"{name[:64]!r} is no option of Ollama's.", "options")
        with naming_origins():
            self._asked = self._make_request(read_options(self.options or {}) | self._format_fields())
        return self

    @property
    def asked(self) -> ChatBody | CompletionBody | None:
        """Return what is to be generated; None if the model is only to be loaded."""
        return self._asked

    @abstractmethod
    def _make_request(self, fields: dict[str, Any]) -> ChatBody | CompletionBody | None: ...

    def _format_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "stream": self.stream is not False}
        if self.format == "json":
            return fields | {"response_format": {"type": "json_object"}}
        if self.format:
            schema = {"name": "answer", "schema": self.format}
            return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}
        return fields

    def _chat(self, messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> ChatBody:
        asked = {**fields, "messages": messages, **self._thinking_fields()}
        if self.logprobs:
            asked |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
        return ChatBody.model_validate(asked)

    def _thinking_fields(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        thinks = self.think is not False
        fields: dict[str, Any] = {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), thinks)}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = "high" if self.think == "max" else self.think
        return fields | {"include_reasoning": thinks}


class OllamaChatBody(GenerationBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(default_factory=list[OllamaMessage])
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def _make_request(self, fields: dict[str, Any]) -> ChatBody | None:
        messages = chat_messages(self.messages)
        return self._chat(messages, {**fields, "tools": self.tools or None}) if messages else None


class GenerateBody(GenerationBody):
    """POST /api/generate: one turn of a chat, or what goes on behind a raw text."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    raw: bool | None = None

    def _make_request(self, fields: dict[str, Any]) -> ChatBody | CompletionBody | None:
        if self.context:
            raise BadRequestError("context is not supported: send the conversation to /api/chat.", "context")
        if self.template:
            raise BadRequestError("template is not supported: send the whole text with raw.", "template")
        if not (self.prompt or self.suffix):
            return None
        if not (self.raw or self.suffix):
            system = [{"role": "system", "content": self.system}] if self.system else []
            return self._chat([*system, {"role": "user", "content": self.prompt}], fields)
        if self.system:
            raise BadRequestError("system cannot be combined with raw or suffix.", "system")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        text = {"prompt": self.prompt, "suffix": self.suffix or None, "logprobs": logprobs}
        return CompletionBody.model_validate({"max_tokens": None, **fields, **text})
