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
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallOpened, Content, Part, Reasoning, merge
from blink.text.message.reasoning import as_prompted, is_reasoning_open
from blink.text.message.reasoning_formats import REASONING_FORMATS, find_reasoning_format, fit_reasoning_format
from blink.vllm.table import load_table

TAGGED = [name for name, form in REASONING_FORMATS.items() if not form.uses_harmony]
THOUGHT = [
    # format, as the prompt leaves it, text, reasoning, content
    ("deepseek_v4", True, "Hm.\n</think>\nYes.", "Hm.", "\nYes."),
    ("qwen3", True, "\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    ("qwen3", None, "\n</think>Yes.", "", "Yes."),
    ("qwen3", None, "</thin", "", "</thin"),
    ("nemotron_v3", None, "\nHm.\n</think>\n\nYes.", "\nHm.", "\n\nYes."),
    ("step3p5", None, "\n <think>Hm.\n\n</think>\nYes.", "Hm.", "\nYes."),
    ("granite_thinking_parser", None, "<think> Hm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
    ("granite_thinking_parser", False, "\nYes.", "", "\nYes."),
    ("glm45", True, "Hm.\n</think>\nYes.", "Hm.", "\nYes."),
    ("seed_oss", None, "<seed:think>Hm <think>.</seed:think>\nYes.", "Hm <think>.", "\nYes."),
    ("seed_oss", None, "Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("granite", None, "Here is my thought process: Hm.\n\nHere is my response:\nYes.", " Hm.\n\n", "\nYes."),
    ("granite", None, "Here's my thought process:\nHm. Here's my response: Yes.", "\nHm. ", " Yes."),
    ("granite", None, "Here is my answer: Yes.", "", "Here is my answer: Yes."),
    ("granite", None, "Here is my thought process: Hm. Here is my", " Hm. Here is my", ""),
    ("gemma4", None, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", None, "<|channel>though I hm<channel|>Yes.", "though I hm", "Yes."),
    ("gemma4", None, "<|channel>thou", "thou", ""),
    ("gemma4", None, "<|channel>thought\n<channel|>\nYes.<channel|>", "", "\nYes."),
    ("gemma4", None, "So.\n<|channel>thought\nHm. <channel|>\nYes<|channel>Or?", "Hm.Or?", "So.\n\nYes"),
    ("gemma4", None, "Yes <|chan", "", "Yes <|chan"),
    ("gemma4", None, "Yes.", "", "Yes."),
    ("plamo3", True, "Hm.<|plamo:end_think:plamo|>Yes.", "Hm.", "Yes."),
    ("kimi_k2", None, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("kimi_k2", True, "Hm.\n</think>Yes.", "Hm.", "Yes."),
    ("kimi_k3", None, "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>", "Hm.", "Yes."),
    ("k2_horizon", None, "Hm.</ifm|think_fast>Yes.", "Hm.", "Yes."),
    ("k2_horizon", True, "<ifm|think_faster> </ifm|think_faster>Yes.", " ", "Yes."),
    ("hy_v4", None, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("hy_v4", True, "Hm.</think:x></think>Yes.", "Hm.</think:x>", "Yes."),
    (
        "inkling",
        None,
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"
        "<|message_model|><|content_thinking|>So.<|end_message|><|message_model|><|content_text|>Or no."
        "<|end_message|><|content_model_end_sampling|>",
        "Hm.So.",
        "Yes.Or no.",
    ),
    ("inkling", None, "<|content_text|>Yes.<|end_message|>", "", "Yes."),
    ("minimax_m3", None, "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("minimax_m3", None, "</mm:think>Yes.", "", "Yes."),
    ("minimax_m3", None, "Yes</mm:think>.", "", "Yes</mm:think>."),
    ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\n", "Hm.", ""),
    ("hunyuan_a13b", None, "<answer>Yes <b>.</answer>", "", "Yes <b>."),
    ("ernie45", None, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes.\n"),
    (
        "cohere_command3",
        None,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
    ),
    ("cohere_command3", None, "<|START_TEXT|>Yes.<|END_TEXT|>", "", "Yes."),
    ("minimax_m2_append_think", None, "Hm.</think>\n\nYes.", "", "<think>Hm.</think>\n\nYes."),
    ("minimax_m2_append_think", None, "<think>Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ("minimax_m2_append_think", None, "", "", "<think>"),
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
    "<|channel>",
    "thought\n",
    "<channel|>",
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


THOUGHT_WITH_SPACE = "<think>\nHm.\n</think>\n\nYes.\n"


def test_a_form_without_space_drops_that_around_reasoning() -> None:
    form = MessageForm(reasoning=REASONING_FORMATS["qwen3"]).without_space()
    for pieces in ([THOUGHT_WITH_SPACE], list(THOUGHT_WITH_SPACE)):
        assert parse(form, pieces) == [Reasoning("Hm."), Content("Yes.\n")]
    assert MessageForm().without_space() == MessageForm()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>Four.", [Reasoning("Four."), Content("Four.")]),
        ("<think>Four.</think>\n", [Reasoning("Four."), Content("\nFour.")]),
        ("<think>Hm.</think>Four.", [Reasoning("Hm."), Content("Four.")]),
        ("", []),
    ],
)
def test_reasoning_that_no_answer_follows_is_the_content_where_a_request_needs_one(
    text: str, parts: list[Part]
) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS["nemotron_v3"], needs_content=True)
    assert parse(form, [text]) == parse(form, list(text)) == parts
    shown = [part for part in parts if isinstance(part, Content)]
    assert parse(replace(form, include_reasoning=False), list(text)) == shown


def test_prompts_may_end_with_each_of_the_tags() -> None:
    form = REASONING_FORMATS["gemma4"]
    assert is_reasoning_open("<|turn>model\n<|channel>thought\n", form) is True
    assert is_reasoning_open("<|turn>model\n<|channel>", form) is True
    assert is_reasoning_open("<|turn>model\n<|channel>thought\n<channel|>", form) is False
    assert is_reasoning_open("...", form, begun="So.<|channel>Hm") is True


def test_the_pair_of_tags_that_a_prompt_begins_is_that_of_its_reply() -> None:
    form = REASONING_FORMATS["k2_horizon"]
    fast = as_prompted(form, "...<ifm|think_fast>\n")
    assert MessageForm(reasoning=fast, is_reasoning_open=True).reasoning_tags == ("", "</ifm|think_fast>")
    assert {*fast.opens} == {*form.opens} and {*fast.closes} == {*form.closes}
    assert as_prompted(form, "...") is form and as_prompted(form, "<ifm|think>") is form


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
        ("<arg_key> <think>", "glm45"),
        ("<｜DSML｜tool_calls> <think>", "deepseek_v4"),
        ("<mm:think>", "minimax_m3"),
        ("<|content_thinking|>", "inkling"),
        ("<ifm|think_fast>", "k2_horizon"),
        ("<|open|>think<|sep|>", "kimi_k3"),
        ("<|START_THINKING|>", "cohere_command3"),
        ("<|plamo:begin_think:plamo|>", "plamo3"),
        ("An <answer> or a <response>: {{ messages[0].content }}", ""),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    found = find_reasoning_format(template)
    assert found == (replace(REASONING_FORMATS[name], begins_inside=False) if name else None)


def test_tags_have_the_end_that_a_template_shows() -> None:
    found = find_reasoning_format("{% if a %}<think:6f1>{% else %}<think:6f1></think:6f1>{% endif %}")
    assert found is not None and (found.open, found.close) == ("<think:6f1>", "</think:6f1>")
    assert fit_reasoning_format(REASONING_FORMATS["hy_v4"], "<think>") == REASONING_FORMATS["hy_v4"]
    assert fit_reasoning_format(REASONING_FORMATS["qwen3"], "<think:6f1>") is REASONING_FORMATS["qwen3"]


def test_auto_is_by_the_template_and_none_is_none(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}<think>")
    assert load_assets(FrontendConfig(chat_template=str(template))).reasoning_format == REASONING_FORMATS["qwen3"]
    assert load_assets(FrontendConfig(chat_template=str(template), reasoning_parser="none")).reasoning_format is None


def test_other_names_of_parsers_are_those_that_there_are() -> None:
    flag = load_table()["--reasoning-parser"]
    names = [word.split("=")[0] for word in flag.words if not word.endswith("=auto")]
    for name in (*names, "glm45", "nemotron_v3", "step3p5"):
        assert flag.to_own(name) in REASONING_FORMATS
