# SPDX-License-Identifier: Apache-2.0
"""What a frontend needs of a model: tokenizer, chat template, end tokens and default sampling. Never the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blink.config import FrontendConfig, parse_object
from blink.errors import ConfigError
from blink.models.weights.files import resolve_model
from blink.text.call_shape import read_call_shape
from blink.text.default_sampling import read_default_sampling
from blink.text.message.format_kinds import CallFormat, ReasoningFormat
from blink.text.message.formats import CALL_FORMATS, HARMONY, HERMES, find_call_format, fit_call_format
from blink.text.message.harmony import END_TOKENS, MARKS
from blink.text.message.reasoning_formats import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    find_reasoning_format,
    fit_reasoning_format,
)
from blink.text.template import ChatTemplate
from blink.text.template_sources import DEFAULT, TOOL_USE, choose_template
from blink.text.tokenizer import Tokenizer
from blink.text.tokenizer_parts import find_end_tokens, load_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAssets:
    """The parts of a model that turn requests into tokens and tokens into text."""

    root: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    tool_template: ChatTemplate | None = None  # for requests with tools, where the model has one of its own
    call_format: CallFormat | None = None  # None: the template has tools in a way that is not known here
    reasoning_format: ReasoningFormat | None = None
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict[str, "float | int"])
    seed: int = 0  # of the seeds of requests that give none; 0: nobody knows them
    template_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # variables of chat templates
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])  # by names such as bos_token
    template_source: str = ""  # of the chat template

    @property
    def uses_harmony(self) -> bool:
        """Say whether replies are messages in gpt-oss' format."""
        return self.call_format is HARMONY

    def template_for(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate | None:
        """Return the chat template for a request with these tools, None if there is none."""
        return (self.tool_template if tools else None) or self.chat_template


def load_assets(config: FrontendConfig) -> ModelAssets:
    """Load the assets of the configured model; --tokenizer and --chat-template replace parts of them.

    Raises:
        ConfigError: a file is missing or broken, or parsers were chosen that do not fit.
    """
    root = resolve_model(config.model.model)
    tokenizer, templates, special_tokens, eos_token_ids = load_parts(config.model, root)
    if root.is_dir():
        # The model, not a borrowed tokenizer, says where its texts end and how it likes to be sampled.
        eos_token_ids = find_end_tokens(root) or eos_token_ids
    templates = choose_template(config.chat_template, templates)
    chat_template, tool_template = (
        ChatTemplate(templates[name], special_tokens) if templates.get(name) else None for name in (DEFAULT, TOOL_USE)
    )
    with_tools = templates.get(TOOL_USE) or templates.get(DEFAULT, "")
    call_format, reasoning_format = _message_formats(config, with_tools, tool_template or chat_template)
    if call_format is HARMONY:
        _check_marks(tokenizer)
        ends = (tokenizer.token_id(name) for name in END_TOKENS)
        eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *(token for token in ends if token is not None)]))
    return ModelAssets(
        root=str(root),
        tokenizer=tokenizer,
        chat_template=chat_template,
        tool_template=tool_template,
        eos_token_ids=eos_token_ids,
        call_format=call_format,
        reasoning_format=reasoning_format,
        sampling_defaults=read_default_sampling(root, config.model),
        seed=config.model.seed,
        template_defaults=parse_object("default_chat_template_kwargs", config.default_chat_template_kwargs),
        special_tokens=special_tokens,
        template_source=templates.get(DEFAULT, ""),
    )


def _message_formats(
    config: FrontendConfig, template: str, compiled: ChatTemplate | None
) -> tuple[CallFormat | None, ReasoningFormat | None]:
    """Return how the model writes calls and reasoning; one in gpt-oss' format is so in all."""
    calls = CALL_FORMATS.get(config.tool_call_parser) or _call_format(template, compiled)
    calls = fit_call_format(calls, template) if calls is not None else None
    reasoning = REASONING_FORMATS.get(config.reasoning_parser)
    reasoning = fit_reasoning_format(reasoning, template) if reasoning is not None else None
    if config.tool_call_parser == "auto" and reasoning is HARMONY_REASONING:
        calls = HARMONY
    if config.reasoning_parser == "auto":
        reasoning = HARMONY_REASONING if calls is HARMONY else find_reasoning_format(template)
    if reasoning is not None and reasoning.uses_harmony is not (calls is HARMONY):
        raise ConfigError(
            f"--tool-call-parser {config.tool_call_parser} and --reasoning-parser {config.reasoning_parser} do not fit:"
            " gpt-oss' format is read by openai and openai_gptoss together."
        )
    return calls, reasoning


def _check_marks(tokenizer: Tokenizer) -> None:
    missing = [name for name in MARKS if tokenizer.token_id(name) not in tokenizer.special_tokens]
    if missing:
        raise ConfigError(
            f"The tokenizer has no special tokens {', '.join(missing)}, between which models with gpt-oss' chat"
            " template write: name another --tokenizer, --chat-template or --tool-call-parser."
        )


def _call_format(template: str, compiled: ChatTemplate | None) -> CallFormat | None:
    if compiled is not None and compiled.traits.tools_place == "none":
        return HERMES  # as the tools are told then
    return CALL_FORMATS.get(find_call_format(template)) or (read_call_shape(compiled) if compiled is not None else None)
