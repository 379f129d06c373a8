# SPDX-License-Identifier: Apache-2.0
"""Load a model's tokenizer, chat templates and end tokens from its files: all of text that an engine imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blink.config import ModelConfig
from blink.fields import Fields
from blink.models.weights.files import resolve_model
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.models.weights.text_files import read_json
from blink.text.gguf_tokenizer import build_tokenizer
from blink.text.template_sources import find_gguf_templates, find_templates
from blink.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from blink.text.tokenizer_files import read_named_tokens

_GGUF_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

# The tokenizer, the chat templates by name, the special tokens by name, and the end tokens.
Parts = tuple[Tokenizer, dict[str, str], dict[str, str], tuple[int, ...]]


def load_parts(config: ModelConfig, root: Path) -> Parts:
    """Load the tokenizer of a model, its templates, special tokens and end tokens.

    Raises:
        ConfigError: a file is missing or broken.
    """
    if config.skip_tokenizer_init:
        return NoTokenizer(), {}, {}, ()
    source = resolve_model(config.tokenizer) if config.tokenizer else root
    return _load_gguf(source) if source.is_file() else _load_directory(source)


def _load_gguf(path: Path) -> Parts:
    metadata = read_gguf_metadata(path)
    tokenizer = Tokenizer(build_tokenizer(metadata))
    fields = Fields(metadata, str(path), "tokenizer.ggml.")
    special_tokens = {
        name: tokenizer.token_name(fields.integer(f"{name}_id", low=0))
        for name in _GGUF_SPECIAL_TOKENS
        if fields.has(f"{name}_id")
    }
    found = (fields.integer(name, low=0) for name in _GGUF_END_TOKENS if fields.has(name))
    templates = find_gguf_templates(metadata, str(path))
    return tokenizer, templates, special_tokens, tuple(dict.fromkeys(found))


def _load_directory(path: Path) -> Parts:
    named = read_named_tokens(path)
    tokenizer, special_tokens = load_tokenizer(path, named), named.texts
    config = _read_if_there(path / "tokenizer_config.json")
    eos_token_ids = find_end_tokens(path)
    if not eos_token_ids and "eos_token" in special_tokens:
        token = tokenizer.token_id(special_tokens["eos_token"])
        eos_token_ids = () if token is None else (token,)
    return tokenizer, find_templates(path, config), special_tokens, eos_token_ids


def find_end_tokens(path: Path) -> tuple[int, ...]:
    """Return the end tokens that a directory's model names."""
    for name in ("generation_config.json", "config.json"):
        fields = Fields(_read_if_there(path / name), str(path / name))
        if fields.has("eos_token_id"):
            return tuple(fields.integers("eos_token_id", as_list=True))
    return ()


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
