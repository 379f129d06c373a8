# SPDX-License-Identifier: Apache-2.0
"""Blink's parsers of reasoning behind the interface of vLLM's: classes by its names, results in its shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from parsers import DeltaMessage, own_name

from blink.text.message.format_kinds import ReasoningFormat
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import Content, Part, Reading, Reasoning
from blink.text.message.reasoning import is_switched_off
from blink.text.message.reasoning_formats import REASONING_FORMATS


class ReasoningParser:
    """One reply's parser of reasoning."""

    name = ""  # vLLM's
    form: ReasoningFormat

    def __init__(
        self, tokenizer: Any, *_: object, chat_template_kwargs: Any = None, reasoning_effort: Any = None, **__: object
    ) -> None:
        self.model_tokenizer = tokenizer
        self._variables = {"reasoning_effort": reasoning_effort, **(chat_template_kwargs or {})}
        self._stream: MessageParser | None = None

    @property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()

    @property
    def reasoning_end_token_ids(self) -> frozenset[int]:
        return frozenset(self.vocab[tag] for tag in (*self.form.closes, *self.form.ends) if tag in self.vocab)

    def extract_reasoning(self, model_output: str, request: Any = None, **_: object) -> tuple[str | None, str | None]:
        parser = self.begin(request)
        parts = parser.push(model_output) + parser.finish()
        kept = [part for part in parts if not (parser.repeats_reasoning and isinstance(part, Reasoning))]
        delta = to_delta(kept)
        return delta.reasoning, delta.content

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: object, **__: object
    ) -> DeltaMessage | None:
        del current_text
        if self._stream is None:
            self._stream = self.begin()
            self._stream.push(previous_text or "")
        parts = self._stream.push(delta_text)
        return to_delta(parts) if parts else None

    def is_reasoning_end(self, input_ids: Sequence[int], *_: object) -> bool:
        text = self.model_tokenizer.decode(list(input_ids))
        parser = self.begin(form=replace(self.form, is_content=False))
        parser.push(text[max(0, *map(text.rfind, self.form.opens)) :])  # of a conversation, the last turn decides
        return not parser.is_reasoning and parser.reading is not Reading.UNSURE

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], *_: object) -> bool:
        return self.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        parser, count = self.begin(), 0
        for token in token_ids:
            parser.push(self.model_tokenizer.decode([token]))
            count += parser.is_reasoning
        return count

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        parser, ids, start = self.begin(), [each for each in input_ids if isinstance(each, int)], 0
        for place, token in enumerate(ids):
            start = start if parser.reading is Reading.UNSURE else place
            if any(isinstance(part, Content) for part in parser.push(self.model_tokenizer.decode([token]))):
                return ids[start:]
        return ids[start:] if any(isinstance(part, Content) for part in parser.finish()) else []

    def begin(self, request: Any = None, form: ReasoningFormat | None = None) -> MessageParser:
        """Return a parser of a reply to a request."""
        variables = {**self._variables, **(getattr(request, "chat_template_kwargs", None) or {})}
        message = MessageForm(
            reasoning=form or self.form,
            is_reasoning_open=_suppose_open(self.name, variables),
            needs_content=variables.get("force_nonempty_content") is True,
        )
        return MessageParser(message)


class DelegatingParser:
    """The parser of whole replies that a test makes from a parser of reasoning."""

    reasoning_parser_cls: type[ReasoningParser]

    def __init__(self, tokenizer: Any, *_: object, **options: Any) -> None:
        self._reasoning = self.reasoning_parser_cls(tokenizer, **options)
        self._stream: MessageParser | None = None

    def parse_delta(self, delta_text: str, *_: object, request: Any, finished: bool, **__: object) -> Any:
        self._stream = self._stream or self._reasoning.begin(request)
        parts = self._stream.push(delta_text) + (self._stream.finish() if finished else [])
        return to_delta(parts) if parts else None


def to_delta(parts: Iterable[Part]) -> DeltaMessage:
    """Return the reasoning and the content of parts."""
    texts = ("".join(part[0] for part in parts if isinstance(part, kind)) or None for kind in (Reasoning, Content))
    return DeltaMessage(**dict(zip(("reasoning", "content"), texts, strict=True)))


def _suppose_open(name: str, variables: Mapping[str, Any]) -> bool | None:
    """Return how the prompt ends: a server sees it; vLLM's parsers suppose it, by the variables of the template."""
    if is_switched_off(variables):
        return False
    if name == "hy_v3":
        return variables["reasoning_effort"] not in (None, "no_think")
    return True if name in _OPENED or variables.get("thinking_mode") == "enabled" else None


_OPENED = ("qwen3", "kimi_k2", "glm45", "glm47")  # whose newer templates end the prompt with the opening tag

# Classes of vLLM's parsers, by the names under which a command line has them.
_CLASSES = {
    "DeepSeekR1ReasoningParser": "deepseek_r1",
    "DeepSeekV4ReasoningParser": "deepseek_v4",
    "DeepSeekV3ReasoningWithThinkingParser": "holo2",
    "Glm45ReasoningParser": "glm45",
    "Glm47MoeReasoningParser": "glm47",
    "NemotronV3ReasoningParser": "nemotron_v3",
    "Ernie45ReasoningParser": "ernie45",
    "Gemma4ReasoningParser": "gemma4",
    "GraniteReasoningParser": "granite",
    "GraniteThinkingReasoningParser": "granite_thinking_parser",
    "HYV3ReasoningParser": "hy_v3",
    "HunyuanA13BReasoningParser": "hunyuan_a13b",
    "K2HorizonReasoningParser": "k2_horizon",
    "KimiK2ReasoningParser": "kimi_k2",
    "KimiK3ReasoningParser": "kimi_k3",
    "MiniMaxM2ReasoningParser": "minimax_m2",
    "MiniMaxM2AppendThinkReasoningParser": "minimax_m2_append_think",
    "MiniMaxM3ReasoningParser": "minimax_m3",
    "MistralReasoningParser": "mistral",
    "Olmo3ReasoningParser": "olmo3",
    "Qwen3ReasoningParser": "qwen3",
    "SeedOSSReasoningParser": "seed_oss",
    "Step3ReasoningParser": "step3",
    "Step3p5ReasoningParser": "step3p5",
}


class ReasoningParserManager:
    """Finds classes by the names of a command line."""

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        return _reasoning_parser(name)


@cache
def _reasoning_parser(name: str) -> type[ReasoningParser]:
    form = REASONING_FORMATS[own_name("--reasoning-parser", name)]
    return type(name, (ReasoningParser,), {"name": name, "form": form})


def find_class(name: str) -> type[Any] | None:
    """Return the class of a parser by one of its names in vLLM, which has two ways to run most of them."""
    name = name.replace("ParserReasoningAdapter", "ReasoningParser")
    return ReasoningParserManager.get_reasoning_parser(_CLASSES[name]) if name in _CLASSES else None


NAMES: dict[str, Any] = {each.__name__: each for each in (DelegatingParser, ReasoningParser, ReasoningParserManager)}
