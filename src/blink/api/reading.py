# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a request's body to checked fields and tokens: all of a request's work that grows with its body.

Needs no event loop and no engine, so that it runs beside the server for large bodies (blink.api.reader).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import TypeAdapter, ValidationError

from blink.api.error_body import describe_validation
from blink.api.json_body import parse_body
from blink.api.responses_schema import ResponsesBody, naming_origins
from blink.api.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, NotFoundError
from blink.link.client import RegionInfo
from blink.request.planner import Planner
from blink.text.assets import ModelAssets
from blink.text.conversation import flatten_messages
from blink.text.json_weight import weigh_json
from blink.text.message import harmony
from blink.text.message.reasoning import is_reasoning_open, is_switched_off
from blink.text.prompt import check_vocabulary, read_tokens

# What is read at once rather than in another process, which takes longer by two waits for a core: some milliseconds of
# work at the worst, of which tokenizing has the most.
LIGHT_BYTES = 8 << 10
_LIGHT_BYTES_OF_IDS = 128 << 10
_LIGHT_CONTAINERS, _LIGHT_ITEMS, _LIGHT_TEXT = 64, 16 << 10, 16 << 10
_CHARS_PER_TOKEN = 4  # of the tokens that /detokenize takes, as a share of the characters that /tokenize takes

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "completions": TypeAdapter(CompletionBody),
    "chat": TypeAdapter(ChatBody),
    "responses": TypeAdapter(ResponsesBody),
    "tokenize": TypeAdapter(TokenizeBody),
    "detokenize": TypeAdapter(DetokenizeBody),
}
_DROPPED: dict[str, Any] = {
    **dict.fromkeys(("user", "tools", "documents", "chat_template_kwargs", "tool_choice", "reasoning_effort")),
    **{"prompt": "", "messages": [], "tokens": []},
}
# The field that most of a body's work is about, for errors that nobody foresaw.
_MAIN_FIELDS = {"completions": "prompt", "chat": "messages", "responses": "input", "detokenize": "tokens"}
Tokens = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a body is measured by."""

    max_tokenize_chars: int
    model_name: str  # empty: not known yet
    engine: RegionInfo | None  # None while there is none: then nothing is tokenized


@dataclass(frozen=True, slots=True)
class Read:
    """A request, and what became of its long fields."""

    body: Any
    prompts: list[Tokens] = field(default_factory=list[Tokens])
    echoes: list[str] = field(default_factory=list[str])
    role: str = "assistant"  # of the conversation's last message
    is_reasoning_open: bool | None = None  # as the prompt leaves it, if it says
    is_answer: bool = False  # the reply does not reason unless it writes the opening tag
    echo: bytes = b""  # of /v1/responses: what the response repeats of its request, as JSON
    has_engine: bool = True  # else nothing was tokenized
    answer: bytes = b""  # of a request that needs no engine's work
    parsed: float = 0.0  # when its fields were checked and its texts not yet tokenized; seconds, time.perf_counter

    def check_engine(self) -> None:
        """Refuse a request that was read when nobody knew how long it may be.

        Raises:
            EngineUnavailableError: no engine was there.
        """
        if not self.has_engine:
            raise EngineUnavailableError("Not available: the engine has just started. Retry.")


def read_body(kind: str, data: bytes | bytearray, assets: ModelAssets, bounds: Bounds) -> Read:
    """Parse and check a body, and tokenize its texts.

    Raises:
        BlinkError: the request is refused.
    """
    try:
        return _read(kind, data, assets, bounds)
    except BlinkError:
        raise
    except ValidationError as error:
        raise describe_validation(error.errors(include_url=False, include_input=False)) from None
    except MemoryError:
        raise BadRequestError("The body takes too much memory to read.") from None
    except Exception as error:  # a fault of this server's, which this body alone brings about
        logger.exception("a body could not be read")
        reason = f"{_MAIN_FIELDS.get(kind, 'The body')} cannot be read: {type(error).__name__}."
        raise BadRequestError(reason, _MAIN_FIELDS.get(kind)) from None


def _read(kind: str, data: bytes | bytearray, assets: ModelAssets, bounds: Bounds) -> Read:
    context = bounds.engine.max_model_len if bounds.engine is not None else 0
    body = _ADAPTERS[kind].validate_python(parse_body(data, context))
    assert isinstance(body, Body)
    if bounds.engine is None:
        return Read(body, has_engine=False)
    if body.model and bounds.model_name and body.model != bounds.model_name:
        raise NotFoundError(f"The model `{body.model}` does not exist.", "model")
    return _READERS[type(body)](body, assets, bounds, bounds.engine)


def is_light(data: bytes | bytearray) -> bool:
    """Say whether reading a body takes a moment only, whatever it asks for: thousands of token ids, or some pages."""
    if len(data) <= LIGHT_BYTES:
        return True
    if len(data) > _LIGHT_BYTES_OF_IDS:
        return False
    weight = weigh_json(data)
    return weight.containers <= _LIGHT_CONTAINERS and weight.items <= _LIGHT_ITEMS and weight.text_bytes <= _LIGHT_TEXT


def without_texts(read: Read) -> Read:
    """Drop what nobody needs any more: the rest is small and travels between processes."""
    dropped = {name: _DROPPED[name] for name in read.body.model_fields_set & _DROPPED.keys()}
    return replace(read, body=read.body.model_copy(update=dropped))


def _read_completion(body: CompletionBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    parsed, sources = time.perf_counter(), body.prompts
    _check_count(len(sources), body, engine)
    prompts = [read_tokens(source, body.prompt_rules, assets.tokenizer, engine) for source in sources]
    echoes = [_text_of(source, assets) for source in sources] if body.echo else []
    del bounds
    return Read(body, prompts, echoes, parsed=parsed)


def _read_chat(body: ChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    del bounds
    parsed = time.perf_counter()
    text = Planner(assets).render(body.messages, body.rendering)
    _check_count(1, body, engine)
    role = body.messages[-1].get("role", "assistant")
    form = assets.reasoning_format
    if assets.in_channels:
        is_open = harmony.is_reasoning_open(text)
    else:
        begun = flatten_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""
        is_open = is_reasoning_open(text, form, begun) if form else None
    is_answer = body.continue_final_message or is_switched_off(body.rendering.variables)
    tokens = read_tokens(text, body.prompt_rules, assets.tokenizer, engine)
    return Read(body, [tokens], role=role, is_reasoning_open=is_open, is_answer=is_answer, parsed=parsed)


def _read_responses(body: ResponsesBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    with naming_origins():
        return replace(_read_chat(body.chat, assets, bounds, engine), echo=body.echo)


def _check_count(num_prompts: int, body: GenerationBody, engine: RegionInfo) -> None:
    if num_prompts * max(body.n or 1, 1) > engine.max_sequences:
        raise BadRequestError(f"One request may ask for at most {engine.max_sequences} sequences.", "n")


def _text_of(source: str | list[int], assets: ModelAssets) -> str:
    return source if isinstance(source, str) else assets.tokenizer.decode(source, skip_special_tokens=False)


def _answer_tokenize(
    body: TokenizeTextBody | TokenizeChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> Read:
    is_text = isinstance(body, TokenizeTextBody)
    text = body.prompt if is_text else Planner(assets).render(body.messages, body.rendering)
    if len(text) > bounds.max_tokenize_chars:
        raise BadRequestError(
            f"The text has {len(text)} characters; this server tokenizes at most {bounds.max_tokenize_chars}.",
            "prompt" if is_text else "messages",
        )
    tokenizer = assets.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=body.add_special_tokens) if text else []
    answer = {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
    }
    return Read(body, answer=orjson.dumps(answer))


def _answer_detokenize(body: DetokenizeBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    limit = max(bounds.max_tokenize_chars // _CHARS_PER_TOKEN, 1)
    if len(body.tokens) > limit:
        raise BadRequestError(f"This server detokenizes at most {limit} token ids, got {len(body.tokens)}.", "tokens")
    check_vocabulary(body.tokens, engine.vocab_size, "tokens")
    text = assets.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Read(body, answer=orjson.dumps({"prompt": text}))


_READERS: dict[type[Body], Callable[[Any, ModelAssets, Bounds, RegionInfo], Read]] = {
    CompletionBody: _read_completion,
    ChatBody: _read_chat,
    ResponsesBody: _read_responses,
    TokenizeTextBody: _answer_tokenize,
    TokenizeChatBody: _answer_tokenize,
    DetokenizeBody: _answer_detokenize,
}
