# SPDX-License-Identifier: Apache-2.0
"""Messages read from models' texts: calls, content and reasoning, the same however the text is cut."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink.text.message.formats import CALL_FORMATS, find_call_format
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reasoning, merge
from blink.text.message.passages import Passages
from blink.text.message.reasoning import is_reasoning_open
from blink.text.message.reasoning_formats import REASONING_FORMATS

# gpt-oss' messages stand between special tokens: test_harmony.py.
TAGGED_CALLS = [name for name, form in CALL_FORMATS.items() if not form.uses_harmony]
JSON_CALLS = [name for name in TAGGED_CALLS if CALL_FORMATS[name].parameters is None]  # others: test_call_parsers.py
TAGGED_REASONING = [name for name, form in REASONING_FORMATS.items() if not form.uses_harmony]
NAMES = frozenset({"get_weather", "add"})
WEATHER = '{"city": "Paris \\"{}[]\\u00e9", "days": [1, {"a": null}]}'
ADD = '{"a": 1, "b": -2.5e3}'


def form_of(name: str, **options: Any) -> MessageForm:
    return MessageForm(calls=CALL_FORMATS[name], names=NAMES, **options)


def parse(form: MessageForm, pieces: Sequence[str]) -> list[Part]:
    parser = MessageParser(form)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    return merge(parts)


def calls_of(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Names and arguments, which follow each other."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallOpened):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls


def content_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


# Texts as models of each family write them, the content and the calls in them.
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "",
        [("get_weather", WEATHER)],
    ),
    (
        "hermes",
        f'Let me look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "add", "arguments": {ADD}}}\n</tool_call>\n',
        "Let me look.",
        [("get_weather", WEATHER), ("add", ADD)],
    ),
    ("hermes", f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>', "", [("add", ADD)]),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {ADD}}}', "", [("add", ADD)]),
    ("hermes", '<tool_call>{"name": "ping"}</tool_call>', "", [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", f'<tool_call>[{{"name": "add", "arguments": {ADD}}}]</tool_call>', "", [("add", ADD)]),
    ("llama3_json", f'{{"name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    ("llama3_json", f'\n{{"type": "function", "name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    (
        "llama3_json",
        f'{{"name": "add", "parameters": {ADD}}}; {{"name": "get_weather", "parameters": {WEATHER}}}',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    ("llama3_json", f'<|python_tag|>{{"name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    (
        "llama3_json",
        f'Two: {{"name": "add", "parameters": {ADD}}}; {{"name": "add", "parameters": {ADD}}}',
        "Two:",
        [("add", ADD), ("add", ADD)],
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}]', "", [("add", ADD)]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments": {WEATHER}}}]',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    (
        "mistral",
        f"I will.[TOOL_CALLS]add{ADD}[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{WEATHER}",
        "I will.",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    (
        "phi4_mini_json",
        f'functools[{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments": {WEATHER}}}]',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    (
        "phi4_mini_json",
        f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}]<|/tool_call|>',
        "",
        [("add", ADD)],
    ),
    (
        "granite",
        f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments": {WEATHER}}}]',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    ("granite", f'Sure. <tool_call>[{{"arguments": {ADD}, "name": "add"}}]', "Sure.", [("add", ADD)]),
]
# Texts without a call: all of each is content.
WITHOUT_CALLS = [
    ("hermes", "Plain text with <tool and < and </tool_call>, and space at its end. \n"),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name" "add"}</tool_call> behind'),
    ("hermes", '<tool_call>{"name": "add", "argu'),
    ("hermes", "<tool_call>\n"),
    ("hermes", "<tool_ca"),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
    ("llama3_json", '{"colour": "red"}, as JSON'),
    ("llama3_json", "[1, 2, 3] are numbers"),
    ("llama3_json", 'I would call {"name": "Bob", "parameters": {}}.'),
    ("mistral", "[TOOL_CALLS] what?"),
    ("mistral", "A list [1, 2] and [TOOL"),
    ("phi4_mini_json", "functools are a module, functools[cache] too"),
    ("granite", "<|tool_call|>[] and <tool_call> are markers"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
def test_what_models_write_is_read(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    parts = parse(form_of(name), [text])
    assert (content_of(parts), calls_of(parts)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), WITHOUT_CALLS)
def test_what_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert parse(form_of(name), [text]) == [Content(text)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_passages_are_the_text_and_calls_are_in_those_of_calls(
    name: str, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    passages = Passages(form_of(name))
    found = [passage for place in range(0, len(text), size) for passage in passages.push(text[place : place + size])]
    found += passages.finish()
    assert "".join(passage.text for passage in found) == text
    free = "".join(passage.text for passage in found if not passage.is_call)
    assert free.strip() == content and not any(arguments in free for _, arguments in calls)


@pytest.mark.parametrize(("name", "text"), WITHOUT_CALLS)
def test_passages_of_what_is_no_call_are_text(name: str, text: str) -> None:
    passages = Passages(form_of(name))
    assert {passage.is_call for passage in passages.push(text) + passages.finish()} == {False}


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in WELL_FORMED] + WITHOUT_CALLS)
def test_every_split_in_two_and_single_characters_give_the_same(name: str, text: str) -> None:
    form = form_of(name)
    whole = parse(form, [text])
    assert parse(form, list(text)) == whole
    for place in range(len(text) + 1):
        assert parse(form, [text[:place], text[place:]]) == whole, text[:place]


FRAGMENTS = [
    *(marker for form in CALL_FORMATS.values() for marker in (*form.opens, *form.closes)),
    *("[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *('{"name": "add", "arguments": ', '{"name": "add"', '"parameters"', "add", ADD, WEATHER),
    *("{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "\u00a0", "é", "null", "1e", "name", "text"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@given(st.sampled_from(TAGGED_CALLS), st.sampled_from([None, *TAGGED_REASONING]), TEXTS, st.booleans(), st.data())
def test_any_text_gives_the_same_parts_however_it_is_cut_and_never_an_error(
    name: str, reasoning: str | None, text: str, parallel: bool, data: st.DataObject
) -> None:
    form = form_of(name, parallel=parallel, reasoning=REASONING_FORMATS[reasoning] if reasoning else None)
    whole = parse(form, [text])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(form, pieces) == whole
    assert parse(form, list(text)) == whole


@given(TEXTS.filter(lambda text: not any(sign in text for sign in ("<tool_call>",))))
def test_a_text_without_the_marker_is_all_content(text: str) -> None:
    assert content_of(parse(form_of("hermes"), [text])) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.sampled_from(JSON_CALLS),
    st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=3),
    st.sampled_from([None, 1]),
)
def test_forced_calls_are_read_back(name: str, arguments: list[dict[str, Any]], indent: int | None) -> None:
    """What the constraint lets the model write is what the parser takes for calls."""
    form = CALL_FORMATS[name]
    calls = [form.begin % "add" + json.dumps(each, indent=indent) + form.end for each in arguments]
    parts = parse(form_of(name), [form.prefix + form.separator.join(calls) + form.suffix])
    assert [(call, json.loads(given)) for call, given in calls_of(parts)] == [("add", each) for each in arguments]
    assert content_of(parts) == ""


def test_arguments_stream_as_they_come() -> None:
    parser = MessageParser(form_of("hermes"))
    assert parser.push('<tool_call>{"name": "add", "arguments": {"a"') == [CallOpened("add"), CallArguments('{"a"')]
    assert parser.push(": 1") == [CallArguments(": 1")]
    assert parser.push("}}</tool_call>") == [CallArguments("}")]
    assert parser.num_calls == 1


@pytest.mark.parametrize("unit", ["\n", "<tool_call>x", '<tool_call>{"name": ', "{", "<", "}]"])
def test_long_texts_take_time_in_proportion(unit: str) -> None:
    """A text that a hostile request may force, read at once."""
    text = "<tool_call>" + unit * (300_000 // len(unit))
    began = time.thread_time()
    assert content_of(parse(form_of("hermes"), [text])).strip() == text.strip()
    assert time.thread_time() - began < 10  # it takes a second at most; minutes where each step copies the rest


def test_malformed_arguments_stay_with_their_call() -> None:
    parts = parse(form_of("hermes"), ['<tool_call>{"name": "add", "arguments": {"a": ]}}</tool_call>'])
    assert calls_of(parts) == [("add", '{"a": ')]
    assert content_of(parts) == "]}}</tool_call>"


def test_without_parallel_calls_all_behind_the_first_is_dropped() -> None:
    text = WELL_FORMED[1][1] + " Done."
    parts = parse(form_of("hermes", parallel=False), [text])
    assert (content_of(parts), calls_of(parts)) == ("Let me look.", [("get_weather", WEATHER)])


THOUGHT = [
    # format, as the prompt leaves it, text, reasoning, content
    ("qwen3", None, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "\nHm.\n\nSo.\n", "\n\nYes."),
    ("qwen3", None, "\n<think>\n\n</think>\n\nYes.", "\n\n", "\n\nYes."),
    ("qwen3", None, " Yes, <think>x</think>.", "", " Yes, <think>x</think>."),
    ("qwen3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", False, "\n\nYes.", "", "\n\nYes."),
    ("qwen3", None, "<think>Hm, and the limit", "Hm, and the limit", ""),
    ("qwen3", None, "<thi", "", "<thi"),
    ("deepseek_r1", None, "Hm.</think>\nYes.", "Hm.", "\nYes."),
    ("deepseek_r1", None, "<think>Hm.</think>\nYes.", "Hm.", "\nYes."),
    ("deepseek_r1", None, "Hm. </thin", "Hm. </thin", ""),
    ("mistral", None, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
]


@pytest.mark.parametrize(("name", "is_open", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_told_from_content(
    name: str, is_open: bool | None, text: str, reasoning: str, content: str
) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS[name], is_reasoning_open=is_open)
    for pieces in ([text], list(text)):
        parts = parse(form, pieces)
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
        assert content_of(parts) == content


def test_a_call_in_the_reasoning_is_none_and_one_behind_it_is() -> None:
    text = f"<think>{WELL_FORMED[0][1]}</think>{WELL_FORMED[0][1]}"
    parts = parse(form_of("hermes", reasoning=REASONING_FORMATS["qwen3"]), [text])
    assert parts[0] == Reasoning(WELL_FORMED[0][1])
    assert calls_of(parts[1:]) == [("get_weather", WEATHER)]
    silent = parse(form_of("hermes", reasoning=REASONING_FORMATS["qwen3"], include_reasoning=False), [text])
    assert silent == parts[1:]


def test_prompts_say_whether_reasoning_is_open() -> None:
    form = REASONING_FORMATS["qwen3"]
    assert is_reasoning_open("<|im_start|>assistant\n<think>\n", form) is True
    assert is_reasoning_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", form) is False
    assert is_reasoning_open("<|im_start|>assistant\n", form) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\n<function=' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
        ("{{ '<|tool_call|>' + call + '<|/tool_call|>' }}", "phi4_mini_json"),
        ("{{ 'respond with <|tool_call|> followed by a JSON list of tools used' }}", "granite"),
        ("{{ ' to=assistant<|channel|>commentary<|message|>' + message.content }}", "openai"),
        ("{{ messages[0].content }}", ""),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    assert find_call_format(template) == name
