# SPDX-License-Identifier: Apache-2.0
"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, model_validator

from blink.api.anthropic.blocks import Texts, Turn
from blink.api.anthropic.errors import naming_origins
from blink.api.anthropic.talk import chat_messages
from blink.api.openai.schema import ChatBody
from blink.api.serving.body import Body
from blink.errors import BadRequestError
from blink.sampling_ranges import SAMPLING_RANGES

MIN_THINKING_TOKENS = 1024
# Field -> why it is taken and changes nothing.
_QUIET = {
    "anthropic_beta": "there are no betas",
    "anthropic_version": "there is one version",
    "billing_policy": "nothing is billed",
    "cache_control": "every prefix is cached",
    "context_management": "the conversation is taken as it comes",
    "diagnostics": "it is about a cache that tells why it was missed",
    "inference_geo": "the server is where it is",
    "service_tier": "all requests are of one tier",
    "speed": "there is one speed",
    "user_profile_id": "there are no profiles",
    "workspace_id": "there are no workspaces",
}
# Field -> why it is refused, unless it asks for nothing.
_REFUSED = {
    "compaction": "This server does not shorten conversations.",
    "container": "This server runs no code.",
    "fallbacks": "This server has one model.",
    "fallback_credit_token": "This server has one model.",
    "mcp_servers": "This server has no tools of its own.",
    "thread": "This server stores no conversations: send all messages.",
}
# Fields by which vLLM widens the API: a chat's own.
_PASSED = (
    "cache_salt",
    "chat_template_kwargs",
    "documents",
    "ignore_eos",
    "logit_bias",
    "min_tokens",
    "priority",
    "request_id",
    "seed",
    "stop_token_ids",
    "structured_outputs",
    "tpot_target_ms",
    "truncate_prompt_tokens",
    *(name for name in SAMPLING_RANGES if name not in {"temperature", "top_k", "top_p"}),  # those are Anthropic's too
)
_QUIET_OF_TOOLS = {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Tool(BaseModel):
    """A tool; one that has a type of Anthropic's own runs there, and is passed over here."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_own(self) -> bool:
        """Say whether the client runs the tool."""
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _check(self) -> Tool:
        for name in ("name", "input_schema"):
            if self.is_own and getattr(self, name) is None:
                raise BadRequestError(f"A tool needs {name}.", "tools")
        for name in self.model_extra or ():
            if self.is_own and name not in _QUIET_OF_TOOLS:
                raise BadRequestError(f"{name}: Extra inputs are not permitted", "tools")
        return self


class ToolChoice(_Strict):
    """What must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise BadRequestError('tool_choice has a name if its type is "tool", and only then.', "tool_choice")
        return self


class Thinking(_Strict):
    """Whether the model reasons before it answers, and whether the answer shows it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise BadRequestError(
                'thinking.budget_tokens must be set if thinking.type is "enabled", and only then.', "thinking"
            )
        return self


class JsonFormat(_Strict):
    """The schema that the answer keeps to."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Strict):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(_Strict):
    """What is known of who asks; it changes nothing."""

    user_id: str | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # its name before output_config had it
    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="after")
    def _read_chat(self) -> CountTokensBody:
        self._check_extra(self.model_extra or {})
        with naming_origins():
            self._chat = ChatBody.model_validate(self._chat_fields())
        return self

    @property
    def chat(self) -> ChatBody:
        """Return the chat that is asked for."""
        return self._chat

    @property
    def shows_thinking(self) -> bool:
        """Say whether the answer tells the text of its reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def thinking_budget(self) -> int | None:
        """Return how many tokens the reasoning may have, None for any number."""
        return self.thinking.budget_tokens if self.thinking is not None else None

    def _check_extra(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if name in _REFUSED and value:
                raise BadRequestError(f"{name} is not supported. {_REFUSED[name]}", name)
            if name not in (*_QUIET, *_REFUSED, *_PASSED):
                raise BadRequestError(f"{name}: Extra inputs are not permitted", name)

    def _chat_fields(self) -> dict[str, Any]:
        extra = self.model_extra or {}
        messages = chat_messages(self.system or (), self.messages)
        fields = {name: extra[name] for name in _PASSED if extra.get(name) is not None}
        fields |= {"model": self.model, "messages": messages, "include_reasoning": not self._is_thoughtless}
        if messages[-1]["role"] == "assistant":
            _check_beginning(messages[-1])
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields | self._tool_fields() | self._thinking_fields(extra) | self._format_fields()

    @property
    def _is_thoughtless(self) -> bool:
        return self.thinking is not None and self.thinking.type == "disabled"

    def _tool_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        tools = [_chat_tool(tool) for tool in self.tools or () if tool.is_own]
        fields: dict[str, Any] = {"tools": tools or None}
        if choice is None or (choice.type == "auto" and not tools):
            return fields
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        named = {"type": "function", "function": {"name": choice.name}}
        return fields | {"tool_choice": named if choice.type == "tool" else _CHOICES[choice.type]}

    def _thinking_fields(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return what tells chat templates to reason or not; what a request tells them itself goes before."""
        fields: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            switches = dict.fromkeys(("enable_thinking", "thinking"), not self._is_thoughtless)
            given = extra.get("chat_template_kwargs")
            fields["chat_template_kwargs"] = {**switches, **given} if isinstance(given, dict) else given or switches
        if self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = _EFFORTS[self.output_config.effort]
        return fields

    def _format_fields(self) -> dict[str, Any]:
        form = (self.output_config.format if self.output_config is not None else None) or self.output_format
        if form is None:
            return {}
        schema = {"name": "answer", "schema": form.schema_}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: StrictBool | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesBody:
        if self.thinking_budget is not None and self.thinking_budget >= self.max_tokens:
            raise BadRequestError("`max_tokens` must be greater than `thinking.budget_tokens`.", "max_tokens")
        return self

    def _chat_fields(self) -> dict[str, Any]:
        return super()._chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": bool(self.stream),
        }


def _check_beginning(message: Mapping[str, Any]) -> None:
    """Refuse an answer that nothing can go on behind: without text, or with calls that wait for their results."""
    if "tool_calls" in message or not message["content"]:
        raise BadRequestError(
            "messages: the last message must hold the results of all tool_use blocks before it, the user's text, or"
            " text of the assistant that its answer goes on behind.",
            "messages",
        )


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    for name in ("description", "strict"):
        if (value := getattr(tool, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}
