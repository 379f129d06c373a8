# SPDX-License-Identifier: Apache-2.0
"""Each way to mark reasoning: told from the answer however the text is cut, and found by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink.config import FrontendConfig
from blink.text.assets import load_assets
from blink.text.message.formats import CALL_FORMATS, REASONING_FORMATS, find_reasoning_format
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallOpened, Content, Part, Reasoning, merge
from blink.vllm.table import load_table

TAGGED = [name for name, form in REASONING_FORMATS.items() if not form.uses_harmony]
THOUGHT = [
    # format, as the prompt leaves it, text, reasoning, content
    ("seed_oss", None, "<seed:think>Hm <think>.</seed:think>\nYes.", "Hm <think>.", "Yes."),
    ("seed_oss", None, "Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("granite", None, "Here is my thought process: Hm.\n\nHere is my response:\nYes.", "Hm.", "Yes."),
    ("granite", None, "Here's my thought process:\nHm. Here's my response: Yes.", "Hm.", "Yes."),
    ("granite", None, "Here is my answer: Yes.", "", "Here is my answer: Yes."),
    ("granite", None, "Here is my thought process: Hm. Here is my", "Hm. Here is my", ""),
    ("gemma4", None, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", None, "Yes.", "", "Yes."),
    ("kimi_k2", None, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("kimi_k2", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    ("hunyuan_a13b", None, "<answer>Yes <b>.</answer>", "", "Yes <b>."),
    ("ernie45", None, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes.\n"),
    ("minimax_m2_append_think", None, "Hm.</think>\n\nYes.", "", "<think>Hm.</think>\n\nYes."),
    ("minimax_m2_append_think", None, "<think>Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ("minimax_m2_append_think", False, "Yes.", "", "Yes."),
]


def parse(form: MessageForm, pieces: Sequence[str]) -> list[Part]:
    parser = MessageParser(form)
    return merge([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def text_of(parts: Sequence[Part], kind: type[Content | Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


@pytest.mark.parametrize(("name", "is_open", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_told_from_content_at_each_cut(
    name: str, is_open: bool | None, text: str, reasoning: str, content: str
) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS[name], is_reasoning_open=is_open)
    cuts = [[text[:place], text[place:]] for place in range(len(text))]
    for pieces in ([text], list(text), *cuts):
        parts = parse(form, pieces)
        assert (text_of(parts, Reasoning), text_of(parts, Content)) == (reasoning, content)


PIECES = [
    "<think>",
    "</think>",
    "Here is my ",
    "thought process:",
    "response:",
    "<answer>",
    "</answer>",
    "\n",
    "a",
    "<",
]


@given(st.sampled_from(TAGGED), st.sampled_from([None, True, False]), st.lists(st.sampled_from(PIECES), max_size=9))
def test_no_cut_changes_what_is_reasoning(name: str, is_open: bool | None, pieces: list[str]) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS[name], is_reasoning_open=is_open)
    assert parse(form, pieces) == parse(form, ["".join(pieces)]) == parse(form, list("".join(pieces)))


def test_calls_end_reasoning_that_has_no_end() -> None:
    form = MessageForm(
        reasoning=REASONING_FORMATS["kimi_k2"], calls=CALL_FORMATS["kimi_k2"], names=frozenset({"f"}), schemas={}
    )
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<think>Hm.<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    for pieces in ([text], list(text)):
        assert parse(form, pieces)[:2] == [Reasoning("Hm."), CallOpened("f")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>assistant\n<think>\n' }}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("<seed:think>", "seed_oss"),
        ("[THINK]", "mistral"),
        ("Write your response after 'Here is my response:'. 'Here is my thought process:'", "granite"),
        ("<|tool_calls_section_begin|> <think></think>", "kimi_k2"),
        ("<think> <answer>", "hunyuan_a13b"),
        ("<|channel>thought", "gemma4"),
        ("An <answer> or a <response>: {{ messages[0].content }}", ""),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    found = find_reasoning_format(template)
    assert found == (replace(REASONING_FORMATS[name], begins_inside=False) if name else None)


def test_auto_is_by_the_template_and_none_is_none(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}<think>")
    assert load_assets(FrontendConfig(chat_template=str(template))).reasoning_format == REASONING_FORMATS["qwen3"]
    assert load_assets(FrontendConfig(chat_template=str(template), reasoning_parser="none")).reasoning_format is None


def test_other_names_of_parsers_are_those_that_there_are() -> None:
    flag = load_table()["--reasoning-parser"]
    for name in ("deepseek_v3", "glm45", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "step3", "step3p5", "kimi"):
        assert flag.to_own(name) in REASONING_FORMATS
