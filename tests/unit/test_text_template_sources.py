# SPDX-License-Identifier: Apache-2.0
"""Which of a model's chat templates a request gets: as in transformers, --chat-template before all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from blink.api.openai.schema import ChatBody
from blink.config import FrontendConfig, ModelConfig
from blink.errors import BadRequestError, ConfigError
from blink.request.rendering import render_messages
from blink.text.assets import load_assets
from blink.text.message.formats import CALL_FORMATS
from blink.text.template_sources import find_gguf_templates
from harmony_model import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}]
TALK = [{"role": "user", "content": "Hi"}]
PLAIN, OTHER = "[plain]{{ messages[0].content }}", "[other]{{ messages[0].content }}"
FOR_TOOLS = "[TOOL_CALLS]{{ tools[0].function.name }}{{ messages[0].content }}"


def listed(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def write_model(folder: Path, entry: Any, files: dict[str, str]) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    config = {} if entry is None else {"chat_template": entry}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def render(folder: Path, tools: Any, **flags: Any) -> str:
    assets = load_assets(FrontendConfig(model=ModelConfig(model=str(folder)), **flags))
    body = ChatBody.model_validate({"messages": TALK, "tools": tools})
    return render_messages(body.messages, body.rendering({}), assets)


FILE, DEFAULT_FILE = "additional_chat_templates/tool_use.jinja", "chat_template.jinja"


@pytest.mark.parametrize(
    ("entry", "files"),
    [
        (listed(default=PLAIN, tool_use=FOR_TOOLS, rag=OTHER), {}),
        (listed(tool_use=FOR_TOOLS, default=PLAIN), {}),
        (None, {DEFAULT_FILE: PLAIN, FILE: FOR_TOOLS, "additional_chat_templates/rag.jinja": OTHER}),
        (listed(default=OTHER, tool_use=OTHER), {DEFAULT_FILE: PLAIN, FILE: FOR_TOOLS}),
    ],
)
def test_tools_have_the_template_that_is_named_for_them(tmp_path: Path, entry: Any, files: dict[str, str]) -> None:
    folder = write_model(tmp_path / "model", entry, files)
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    for tools in (TOOLS, None):
        expected = reference.apply_chat_template(TALK, tools=tools, tokenize=False, add_generation_prompt=True)
        assert render(folder, tools) == expected
    assert render(folder, TOOLS).startswith("[TOOL_CALLS]f")
    assets = load_assets(FrontendConfig(model=ModelConfig(model=str(folder))))
    assert assets.call_format == CALL_FORMATS["mistral"]


def test_the_flag_names_a_file_or_one_of_the_templates_for_all_chats(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", listed(default=PLAIN, tool_use=FOR_TOOLS, rag=OTHER), {})
    (tmp_path / "own.jinja").write_text("[own]{{ tools is none }}{{ messages[0].content }}")
    assert render(folder, None, chat_template="rag") == "[other]Hi"
    assert render(folder, TOOLS, chat_template=str(tmp_path / "own.jinja")).startswith("[own]")
    assert render(folder, None, chat_template=str(tmp_path / "own.jinja")) == "[own]TrueHi"


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("[text]{{ messages[0].content }}", "[text]Hi"),
        ("{% if true %}[if]{% endif %}", "[if]"),
        ("examples/tool_chat_template_hermes.jinja", "[plain]Hi"),
        ("/vllm-workspace/tool_chat_template_llama4_pythonic.jinja", "[plain]Hi"),
    ],
)
def test_the_flag_may_be_a_text_or_a_file_of_vllms_that_is_not_here(tmp_path: Path, flag: str, shown: str) -> None:
    folder = write_model(tmp_path / "model", PLAIN, {})
    assert render(folder, None, chat_template=flag) == shown


@pytest.mark.parametrize("flag", ["template_alpaca.jinja", "tool_chat_template_x.txt", "no/such.jinja"])
def test_another_file_that_is_not_here_is_refused(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match="missing or no ordinary file"):
        render(write_model(tmp_path / "model", PLAIN, {}), None, chat_template=flag)


def test_a_file_of_that_name_that_is_here_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tool_chat_template_mine.jinja"
    file.write_text(OTHER)
    assert render(write_model(tmp_path / "model", PLAIN, {}), None, chat_template=str(file)) == "[other]Hi"


def test_variables_for_all_chats_give_way_to_a_requests_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "{{ a }}{{ b }}{{ messages[0].content }}", {})
    defaults = '{"a": 1, "b": 2}'
    model = ModelConfig(model=str(folder))
    assets = load_assets(FrontendConfig(model=model, default_chat_template_kwargs=defaults))
    body = ChatBody.model_validate({"messages": TALK, "chat_template_kwargs": {"b": 3}})
    assert render_messages(body.messages, body.rendering(assets.template_defaults), assets) == "13Hi"
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs must be a JSON object"):
        FrontendConfig(default_chat_template_kwargs="[1]")


def test_without_a_default_only_tools_have_a_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", listed(tool_use=FOR_TOOLS), {})
    assert render(folder, TOOLS) == "[TOOL_CALLS]fHi"
    with pytest.raises(BadRequestError, match="no chat template"):
        render(folder, None)


@pytest.mark.parametrize("entry", [[3], [{"name": "default"}], [{"template": PLAIN}], 3])
def test_malformed_lists_of_templates_are_config_errors(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        render(write_model(tmp_path / "model", entry, {}), None)


def test_gguf_files_have_named_templates() -> None:
    metadata = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": FOR_TOOLS}
    found = find_gguf_templates({**metadata, "tokenizer.chat_templates": ["tool_use"]}, "m.gguf")
    assert found == {"default": PLAIN, "tool_use": FOR_TOOLS}
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        find_gguf_templates({"tokenizer.chat_template.rag": 3}, "m.gguf")
