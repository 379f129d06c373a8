# SPDX-License-Identifier: Apache-2.0
"""Blink's parsers of calls behind the interface of vLLM's: classes by its names, results in its shapes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers_of_models
from pydantic import BaseModel, ConfigDict, Field

from blink.text.message.format_kinds import CallFormat
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, Part
from blink.vllm.table import load_table

_BEGINNING_CHARS = 2  # of arguments


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


def _new_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str = Field(default_factory=_new_id)
    type: str = "function"
    function: FunctionCall


class ExtractedToolCallInformation(_Body):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(_Body):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(_Body):
    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(_Body):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list[DeltaToolCall])


class FunctionDefinition(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam(_Body):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionRequest(_Body):
    """What a parser is told of a request."""

    messages: list[Any] = Field(default_factory=list[Any])
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True


class _AllNames(frozenset[str]):
    """The functions of a request that names none: a call is a call whatever its name."""

    def __contains__(self, item: object) -> bool:
        return True


class ToolParser:
    """One reply's parser of calls."""

    form: CallFormat
    supports_required_and_named = True

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None, *_: object, **__: object) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.streamed_args_for_tool: list[str] = []
        self._stream: MessageParser | None = None
        self._held: list[Part] = []  # for the next delta

    @property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(self, model_output: str, request: Any = None, **_: object) -> ExtractedToolCallInformation:
        parser = self._begin(request)
        parts = parser.push(model_output) + parser.finish()
        calls = [
            ToolCall(id=self._make_id(name, place), function=FunctionCall(name=name, arguments=text))
            for place, (name, text) in enumerate(_calls_of(parts))
        ]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: object, request: Any = None, **__: object
    ) -> DeltaMessage | None:
        request = request or next((one for one in reversed(_) if isinstance(one, ChatCompletionRequest)), None)
        # Some tests give the text before or the whole one only if their parser of vLLM's reads them.
        if self._stream is None or (not previous_text and current_text == delta_text):
            self._stream, self._held = self._begin(request), []
        first = self._stream.num_calls
        parts, self._held = _until_opened([*self._held, *self._stream.push(delta_text)])
        return self._to_delta(parts, first)

    def finish_streaming(self) -> DeltaMessage | None:
        assert self._stream is not None
        parts, self._held = [*self._held, *self._stream.finish()], []
        return self._to_delta(parts, self._stream.num_calls)

    def _begin(self, request: Any) -> MessageParser:
        tools = (getattr(request, "tools", None) or self.tools) or []
        schemas = {name: parameters or {} for name, parameters in map(_describe, tools)}
        names = frozenset(schemas) or _AllNames()
        return MessageParser(MessageForm(calls=self.form, names=names, schemas=schemas))

    def _make_id(self, name: str, place: int) -> str:
        return self.form.id_form % (name, place) if self.form.id_form else _new_id()

    def _to_delta(self, parts: Iterable[Part], num_calls: int) -> DeltaMessage | None:
        delta, calls = DeltaMessage(), dict[int, DeltaToolCall]()
        for part in parts:
            if isinstance(part, Content):
                delta.content = (delta.content or "") + part.text
            elif isinstance(part, CallOpened):
                identity = {"id": self._make_id(part.name, num_calls), "type": "function"}
                function = DeltaFunctionCall(name=part.name, arguments="")
                calls[num_calls] = DeltaToolCall(index=num_calls, function=function, **identity)
                self.prev_tool_call_arr.append({"name": part.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
                num_calls += 1
            elif isinstance(part, CallArguments):
                index = num_calls - 1
                call = calls.setdefault(index, DeltaToolCall(index=index, function=DeltaFunctionCall(arguments="")))
                assert call.function is not None
                call.function.arguments = (call.function.arguments or "") + part.text
                self.streamed_args_for_tool[index] += part.text
                self.prev_tool_call_arr[index]["arguments"] = self.streamed_args_for_tool[index]
        delta.tool_calls = [calls[index] for index in sorted(calls)]
        return delta if delta.content is not None or calls else None


def _until_opened(parts: list[Part]) -> tuple[list[Part], list[Part]]:
    """Cut parts behind a call that has just opened: the API sends its arguments in a chunk of their own.

    Only the beginning of the arguments is: what is longer came in one piece, behind which a test may look no further.
    """
    if len(parts) < 2 or not isinstance(parts[-2], CallOpened) or not isinstance(parts[-1], CallArguments):
        return parts, []
    if len(parts[-1].text) > _BEGINNING_CHARS:
        return parts, []
    return (parts, []) if parts[-1].text == "{}" else (parts[:-1], parts[-1:])


def _calls_of(parts: Iterable[Part]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallOpened):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return calls


def _describe(tool: Any) -> tuple[str, Mapping[str, Any] | None]:
    """Return name and schema of a tool, in any of the shapes that tests give it."""
    plain = tool if isinstance(tool, dict) else tool.model_dump()
    function = plain.get("function") or plain
    return function["name"], function.get("parameters")


def own_name(flag: str, name: str) -> str:
    """Return Blink's name of a parser that a flag has under one of vLLM's."""
    return load_table()[flag].to_own(name)


# Classes of vLLM's parsers, by the names under which a command line has them.
_CALL_CLASSES = {
    "ApertusToolParser": "apertus",
    "DeepSeekV3ToolParser": "deepseek_v3",
    "DeepSeekV31ToolParser": "deepseek_v31",
    "DeepSeekV32ToolParser": "deepseek_v32",
    "DeepSeekV4ToolParser": "deepseek_v4",
    "DotsToolParser": "dots",
    "Ernie45ToolParser": "ernie45",
    "FunctionGemmaToolParser": "functiongemma",
    "Gemma4ToolParser": "gemma4",
    "GigaChat3ToolParser": "gigachat3",
    "Glm4MoeModelToolParser": "glm45",
    "Glm47MoeModelToolParser": "glm47",
    "Granite4ToolParser": "granite4",
    "GraniteToolParser": "granite",
    "HYV3ToolParser": "hy_v3",
    "Hermes2ProToolParser": "hermes",
    "HunyuanA13BToolParser": "hunyuan_a13b",
    "Internlm2ToolParser": "internlm",
    "JambaToolParser": "jamba",
    "K2HorizonToolParser": "k2_horizon",
    "KimiK2ToolParser": "kimi_k2",
    "KimiK3ToolParser": "kimi_k3",
    "Lfm2ToolParser": "lfm2",
    "Llama3JsonToolParser": "llama3_json",
    "Llama4PythonicToolParser": "llama4_pythonic",
    "LongcatFlashToolParser": "longcat",
    "MiniCPM5XMLToolParser": "minicpm5",
    "MinimaxM2ToolParser": "minimax_m2",
    "MinimaxM3ToolParser": "minimax_m3",
    "MinimaxToolParser": "minimax",
    "MistralToolParser": "mistral",
    "Olmo3PythonicToolParser": "olmo3",
    "Phi4MiniJsonToolParser": "phi4_mini_json",
    "PoolsideV1ToolParser": "poolside_v1",
    "PythonicToolParser": "pythonic",
    "Qwen3CoderToolParser": "qwen3_coder",
    "Qwen3ToolParser": "qwen3_coder",
    "Qwen3XMLToolParser": "qwen3_xml",
    "SeedOssToolParser": "seed_oss",
    "Step3p5ToolParser": "step3p5",
    "Step3ToolParser": "step3",
    "xLAMToolParser": "xlam",
}


class ToolParserManager:
    """Finds classes by the names of a command line."""

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        return _tool_parser(own_name("--tool-call-parser", name))


@cache
def _tool_parser(own: str) -> type[ToolParser]:
    return type(own, (ToolParser,), {"form": CALL_FORMATS[own]})


def find_class(name: str) -> type[Any] | None:
    """Return the class of a parser by one of its names in vLLM, which has two ways to run most of them."""
    name = re.sub("Engine(?=ToolParser)", "", name)
    return ToolParserManager.get_tool_parser(_CALL_CLASSES[name]) if name in _CALL_CLASSES else None


_PUBLIC = (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    FunctionDefinition,
    ToolCall,
    ToolParser,
    ToolParserManager,
)
NAMES: dict[str, Any] = {each.__name__: each for each in _PUBLIC}
NAMES |= {
    "cached_tokenizer_from_config": tokenizers_of_models.find,
    "detokenize_incrementally": tokenizers_of_models.detokenize_one,
    "get_tokenizer": tokenizers_of_models.find,
    # No other modules of vLLM have these.
    "TOOL_CALL_START": CALL_FORMATS["gemma4"].opens[0],
    "TOOL_CALL_END": CALL_FORMATS["gemma4"].closes[0],
    "TOOL_CALLS_PREFIX": CALL_FORMATS["apertus"].opens[0],
    "TOOL_CALLS_SUFFIX": CALL_FORMATS["apertus"].closes[0],
}
