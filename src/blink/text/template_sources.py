# SPDX-License-Identifier: Apache-2.0
"""Find the chat templates that come with a model, by their names, as transformers does."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.fields import Fields
from blink.models.weights.text_files import TEMPLATE_FOLDER, read_named_text, read_text

DEFAULT = "default"
TOOL_USE = "tool_use"  # for requests with tools
_VLLM_FILE = re.compile(r"tool_chat_template_[\w.-]+\.jinja")
_GGUF_KEY = "tokenizer.chat_template"

logger = logging.getLogger("blink.model")


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a directory whose tokenizer_config.json is `config`; files of their own win.

    Raises:
        ConfigError: one is malformed or cannot be read.
    """
    found = _read_config(config, str(folder / "tokenizer_config.json"))
    file = folder / "chat_template.jinja"
    if file.is_file():
        found[DEFAULT] = read_text(file, root=folder)
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        found[path.stem] = read_text(path, root=folder)
    return found


def choose_template(name: str, templates: dict[str, str]) -> dict[str, str]:
    """Return the templates that --chat-template leaves: all, or one for all chats.

    `name` is a file, one of the model's templates, the text of a template, or a file that vLLM brings and that is not
    here: such a file shows tools to one family of models, as their own templates do.

    Raises:
        ConfigError: there is no such file.
    """
    if not name:
        return templates
    if name in templates:
        return {DEFAULT: templates[name]}
    if "{{" in name or "{%" in name:
        return {DEFAULT: name}
    path = Path(name)
    if _VLLM_FILE.fullmatch(path.name) and not path.exists() and templates.get(DEFAULT):
        logger.info("--chat-template: %s is not here; the model's own template is used", name)
        return templates
    return {DEFAULT: read_named_text(path)}


def _read_config(config: Mapping[str, Any], place: str) -> dict[str, str]:
    entry = config.get("chat_template")
    if not isinstance(entry, list):
        return {DEFAULT: Fields(config, place).text("chat_template", "")}
    named = [Fields(item if isinstance(item, dict) else {}, f"{place}: chat_template") for item in entry]
    return {fields.text("name"): fields.text("template") for fields in named}


def find_gguf_templates(metadata: Mapping[str, Any], place: str) -> dict[str, str]:
    """Return the templates that a GGUF file's metadata holds.

    Raises:
        ConfigError: one is no text.
    """
    fields = Fields(metadata, place)
    keys = [key for key in metadata if key == _GGUF_KEY or key.startswith(_GGUF_KEY + ".")]
    return {key[len(_GGUF_KEY) + 1 :] or DEFAULT: fields.text(key, "") for key in keys}
