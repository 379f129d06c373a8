# SPDX-License-Identifier: Apache-2.0
"""What a frontend needs of a model: tokenizer, chat template, end tokens and default sampling. Never the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blink.config import FrontendConfig
from blink.errors import ConfigError
from blink.models.weights.files import resolve_model
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.text.gguf_tokenizer import build_tokenizer
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
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict[str, "float | int"])


def load_assets(config: FrontendConfig) -> ModelAssets:
    """Load the assets of the configured model; --tokenizer and --chat-template replace parts of them.

    Raises:
        ConfigError: a file is missing or broken.
    """
    root = resolve_model(config.model.model)
    tokenizer, template, special_tokens, eos_token_ids = _load_parts(config, root)
    if root.is_dir():
        # The model, not a borrowed tokenizer, says where its texts end and how it likes to be sampled.
        eos_token_ids = _end_tokens(root) or eos_token_ids
    if config.chat_template:
        template = _read_text(Path(config.chat_template))
    return ModelAssets(
        root=str(root),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, special_tokens) if template else None,
        eos_token_ids=eos_token_ids,
        sampling_defaults=_sampling_defaults(root),
    )


_Parts = tuple[Tokenizer, str, dict[str, str], tuple[int, ...]]


def _load_parts(config: FrontendConfig, root: Path) -> _Parts:
    if config.model.skip_tokenizer_init:
        return NoTokenizer(), "", {}, ()
    source = resolve_model(config.model.tokenizer) if config.model.tokenizer else root
    return _load_gguf(source) if source.is_file() else _load_directory(source)


def _load_gguf(path: Path) -> _Parts:
    metadata = read_gguf_metadata(path)
    tokenizer = Tokenizer(build_tokenizer(metadata))
    special_tokens = {
        name: tokenizer.token_name(metadata[f"tokenizer.ggml.{name}_id"])
        for name in _SPECIAL_TOKENS
        if f"tokenizer.ggml.{name}_id" in metadata
    }
    found = (metadata.get(f"tokenizer.ggml.{name}") for name in _GGUF_END_TOKENS)
    eos_token_ids = tuple(dict.fromkeys(token for token in found if token is not None))
    return tokenizer, metadata.get("tokenizer.chat_template", ""), special_tokens, eos_token_ids


def _load_directory(path: Path) -> _Parts:
    tokenizer = load_tokenizer(path)
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
    file = path / "chat_template.jinja"
    template = _read_text(file) if file.is_file() else _default_template(config.get("chat_template"))
    eos_token_ids = _end_tokens(path)
    if not eos_token_ids and "eos_token" in special_tokens:
        token = tokenizer.token_id(special_tokens["eos_token"])
        eos_token_ids = () if token is None else (token,)
    return tokenizer, template, special_tokens, eos_token_ids


def _token_text(entry: Any) -> str:
    return entry.get("content", "") if isinstance(entry, dict) else entry or ""


def _default_template(entry: Any) -> str:
    if isinstance(entry, list):  # several named templates
        return next((item["template"] for item in entry if item.get("name") == "default"), "")
    return entry or ""


def _end_tokens(path: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _read_json(path / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _sampling_defaults(root: Path) -> dict[str, float | int]:
    if not root.is_dir():
        return {}
    config = _read_json(root / "generation_config.json")
    return {name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
