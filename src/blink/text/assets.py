# SPDX-License-Identifier: Apache-2.0
"""What a frontend needs of a model: tokenizer, chat template, end tokens and default sampling. Never the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blink.config import FrontendConfig
from blink.errors import BadRequestError, ConfigError
from blink.models.weights.fields import Fields
from blink.models.weights.files import resolve_model
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.models.weights.text_files import read_json, read_named_text, read_text
from blink.sampling_params import SamplingParams
from blink.text.gguf_tokenizer import build_tokenizer
from blink.text.message.formats import (
    CALL_FORMATS,
    HARMONY,
    HARMONY_REASONING,
    HERMES,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
)
from blink.text.message.harmony import END_TOKENS, MARKS
from blink.text.template import ChatTemplate
from blink.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAssets:
    """The parts of a model that turn requests into tokens and tokens into text."""

    root: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    call_format: CallFormat | None = None  # None: the template has tools in a way that is not known here
    reasoning_format: ReasoningFormat | None = None
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict[str, "float | int"])

    @property
    def in_channels(self) -> bool:
        """Say whether replies are messages in gpt-oss' format."""
        return self.call_format is HARMONY


def load_assets(config: FrontendConfig) -> ModelAssets:
    """Load the assets of the configured model; --tokenizer and --chat-template replace parts of them.

    Raises:
        ConfigError: a file is missing or broken, or parsers were chosen that do not fit.
    """
    root = resolve_model(config.model.model)
    tokenizer, template, special_tokens, eos_token_ids = _load_parts(config, root)
    if root.is_dir():
        # The model, not a borrowed tokenizer, says where its texts end and how it likes to be sampled.
        eos_token_ids = _end_tokens(root) or eos_token_ids
    if config.chat_template:
        template = read_named_text(Path(config.chat_template))
    chat_template = ChatTemplate(template, special_tokens) if template else None
    call_format, reasoning_format = _message_formats(config, template, chat_template)
    if call_format is HARMONY:
        _check_marks(tokenizer)
        ends = (tokenizer.token_id(name) for name in END_TOKENS)
        eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *(token for token in ends if token is not None)]))
    return ModelAssets(
        root=str(root),
        tokenizer=tokenizer,
        chat_template=chat_template,
        eos_token_ids=eos_token_ids,
        call_format=call_format,
        reasoning_format=reasoning_format,
        sampling_defaults=_sampling_defaults(root),
    )


def _message_formats(
    config: FrontendConfig, template: str, compiled: ChatTemplate | None
) -> tuple[CallFormat | None, ReasoningFormat | None]:
    """Return how the model writes calls and reasoning; one in gpt-oss' format is so in all."""
    calls = CALL_FORMATS.get(config.tool_call_parser) or _call_format(template, compiled)
    reasoning = REASONING_FORMATS.get(config.reasoning_parser)
    if config.tool_call_parser == "auto" and reasoning is HARMONY_REASONING:
        calls = HARMONY
    if calls is HARMONY and config.reasoning_parser == "auto":
        reasoning = HARMONY_REASONING
    if reasoning is not None and reasoning.in_channels is not (calls is HARMONY):
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
    if compiled is not None and compiled.tools_place == "none":
        return HERMES  # as the tools are told then
    return CALL_FORMATS.get(find_call_format(template))


_Parts = tuple[Tokenizer, str, dict[str, str], tuple[int, ...]]


def _load_parts(config: FrontendConfig, root: Path) -> _Parts:
    if config.model.skip_tokenizer_init:
        return NoTokenizer(), "", {}, ()
    source = resolve_model(config.model.tokenizer) if config.model.tokenizer else root
    return _load_gguf(source) if source.is_file() else _load_directory(source)


def _load_gguf(path: Path) -> _Parts:
    metadata = read_gguf_metadata(path)
    tokenizer = Tokenizer(build_tokenizer(metadata))
    fields = Fields(metadata, str(path), "tokenizer.ggml.")
    special_tokens = {
        name: tokenizer.token_name(fields.integer(f"{name}_id", low=0))
        for name in _SPECIAL_TOKENS
        if fields.has(f"{name}_id")
    }
    found = (fields.integer(name, low=0) for name in _GGUF_END_TOKENS if fields.has(name))
    template = Fields(metadata, str(path)).text("tokenizer.chat_template", "")
    return tokenizer, template, special_tokens, tuple(dict.fromkeys(found))


def _load_directory(path: Path) -> _Parts:
    tokenizer = load_tokenizer(path)
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
    file = path / "chat_template.jinja"
    template = read_text(file) if file.is_file() else _default_template(config, path)
    eos_token_ids = _end_tokens(path)
    if not eos_token_ids and "eos_token" in special_tokens:
        token = tokenizer.token_id(special_tokens["eos_token"])
        eos_token_ids = () if token is None else (token,)
    return tokenizer, template, special_tokens, eos_token_ids


def _token_text(entry: object) -> str:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _default_template(config: Mapping[str, Any], path: Path) -> str:
    entry = config.get("chat_template")
    if isinstance(entry, list):  # several named templates
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[0].get("template") if named else ""
    return Fields({"chat_template": entry}, str(path / "tokenizer_config.json")).text("chat_template", "")


def _end_tokens(path: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        fields = Fields(_read_json(path / name), str(path / name))
        if fields.has("eos_token_id"):
            return tuple(fields.integers("eos_token_id", as_list=True))
    return ()


def _sampling_defaults(root: Path) -> dict[str, float | int]:
    if not root.is_dir():
        return {}
    path = root / "generation_config.json"
    config = _read_json(path)
    defaults = {name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (BadRequestError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path} is malformed: {error}") from error
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
