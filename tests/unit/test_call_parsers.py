# SPDX-License-Identifier: Apache-2.0
"""Calls read from each family's own form: the same however a text is cut, typed by the schemas, in linear time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink.text.message.argument_types import argument_types, to_json
from blink.text.message.formats import CALL_FORMATS, find_call_format, fit_call_format
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, merge
from blink.text.message.passages import Passages
from blink.vllm.table import load_table
from call_texts import LOOK_ALIKES, NAMES, SCHEMAS, Written
from call_texts import TEXTS as EARLY_TEXTS
from cpu_seconds import least_seconds
from late_call_texts import LATE_LOOK_ALIKES, LATE_TEXTS, keyed_texts

TEXTS = [*EARLY_TEXTS, *LATE_TEXTS]
IDS = [f"{each.format}-{place}" for place, each in enumerate(TEXTS)]
NEW = sorted({each.format for each in TEXTS})


_DSML = '<｜DSML｜invoke name="book"><｜DSML｜parameter name="%s"%s>%s</｜DSML｜parameter></｜DSML｜invoke>'


def parse(name: str, pieces: Sequence[str], **options: Any) -> list[Part]:
    parser = MessageParser(MessageForm(calls=CALL_FORMATS[name], names=NAMES, schemas=SCHEMAS, **options))
    return merge([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def read(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls with the text of their arguments."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallOpened):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return "".join(part.text for part in parts if isinstance(part, Content)), calls


@pytest.mark.parametrize("written", TEXTS, ids=IDS)
def test_what_models_write_is_read(written: Written) -> None:
    content, calls = read(parse(written.format, [written.text]))
    assert (content, [(name, json.loads(text)) for name, text in calls]) == (written.content, written.calls)


@pytest.mark.parametrize(("name", "text"), [*LOOK_ALIKES, *LATE_LOOK_ALIKES])
def test_what_only_looks_like_a_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert parse(name, [text]) == parse(name, list(text)) == [Content(text)]


@pytest.mark.parametrize("written", TEXTS, ids=IDS)
def test_some_cuts_and_single_characters_give_the_same(written: Written) -> None:
    check_cuts(written, 5)


@pytest.mark.long
@pytest.mark.parametrize("written", TEXTS, ids=IDS)
def test_each_cut_and_each_size_give_the_same(written: Written) -> None:
    check_cuts(written, 1)
    whole, text = parse(written.format, [written.text]), written.text
    for size in range(2, 40):
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        assert parse(written.format, pieces) == whole, size


def check_cuts(written: Written, step: int) -> None:
    text = written.text
    whole = parse(written.format, [text])
    assert parse(written.format, list(text)) == whole
    for place in range(0, len(text), step):
        assert parse(written.format, [text[:place], text[place:]]) == whole, text[:place]


@pytest.mark.parametrize("written", TEXTS, ids=IDS)
def test_a_text_that_ends_too_early_has_the_calls_that_have_begun(written: Written) -> None:
    """What came of a stream stays, and a call that was opened is never content as well."""
    for size in range(0, len(written.text), 7):
        parser = MessageParser(MessageForm(calls=CALL_FORMATS[written.format], names=NAMES, schemas=SCHEMAS))
        begun = parser.push(written.text[:size])
        content, calls = read(merge(begun + parser.finish()))
        assert [name for name, _ in calls] == [name for name, _ in written.calls[: len(calls)]]
        if calls:
            streamed = read(begun)[1]
            assert all(text.startswith(before) for (_, text), (_, before) in zip(calls, streamed, strict=True))
            assert "Peace" not in content


@pytest.mark.parametrize("written", TEXTS, ids=IDS)
@pytest.mark.parametrize("size", [1, 9])
def test_passages_are_the_text_and_content_is_in_those_of_text(written: Written, size: int) -> None:
    form = MessageForm(calls=CALL_FORMATS[written.format], names=NAMES, schemas=SCHEMAS)
    passages, text = Passages(form), written.text
    found = [passage for place in range(0, len(text), size) for passage in passages.push(text[place : place + size])]
    found += passages.finish()
    assert "".join(passage.text for passage in found) == text
    assert "Peace" not in "".join(passage.text for passage in found if not passage.is_call)


FRAGMENTS = sorted({each for written in TEXTS for each in re.findall(r"</?[^<>\n]{1,30}>|\w+|[^\w<]", written.text)})
ANY_TEXT = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=16).map("".join)


@given(st.sampled_from(NEW), ANY_TEXT, st.booleans(), st.data())
def test_no_text_is_an_error_and_no_cut_changes_what_it_means(
    name: str, text: str, parallel: bool, data: st.DataObject
) -> None:
    begins = data.draw(st.sampled_from(["", *CALL_FORMATS[name].opens, CALL_FORMATS[name].prefix]))
    whole = parse(name, [begins + text], parallel=parallel)
    place = data.draw(st.integers(0, len(begins + text)))
    assert parse(name, [(begins + text)[:place], (begins + text)[place:]], parallel=parallel) == whole
    assert parse(name, list(begins + text), parallel=parallel) == whole


@pytest.mark.parametrize("name", NEW)
def test_long_texts_take_time_in_proportion(name: str) -> None:
    texts = [each.text for each in TEXTS if each.format == name]
    for text in texts:
        for size in (len(text), len(text) * 2 // 3, len(text) // 3):
            unit = text[:size]
            long = unit + unit[-9:] * (20_000 // 9)
            cuts = [long[place : place + 3] for place in range(0, 4000, 3)]
            assert least_seconds(lambda long=long, cuts=cuts: (parse(name, [long]), parse(name, cuts)), enough=1) < 1, (
                unit
            )


def test_a_streamed_string_comes_as_it_grows() -> None:
    parser = MessageParser(MessageForm(calls=CALL_FORMATS["qwen3_coder"], names=NAMES, schemas=SCHEMAS))
    parser.push("<tool_call>\n<function=book>\n<parameter=title>\n")
    assert parser.push('a "b') == [CallArguments('a \\"b')]
    assert parser.push("\n") == []  # it may belong to the tag
    assert parser.push("c\n</para") == [CallArguments("\\nc")]
    assert parser.push("meter>") == [CallArguments('"')]


def test_without_parallel_calls_all_behind_the_first_is_dropped() -> None:
    for written in TEXTS:
        content, calls = read(parse(written.format, [written.text + " More."], parallel=False))
        assert [name for name, _ in calls] == [written.calls[0][0]] and "More" not in content


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "+007", 7),
        ({"type": "integer"}, "7.0", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "-7.5e1", -75),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "7.50", 7.5),
        ({"type": "float"}, "7.25", 7.25),
        ({"type": ["int", "null"]}, "7", 7),
        ({"type": "dict"}, "{}", {}),
        ({"type": "money"}, "7", 7),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "no", "no"),
        ({"type": "null"}, "None", None),
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, " nul ", " nul "),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '{"a": {"b": []}}', {"a": {"b": []}}),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "1e", "1e"),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/flag"}]}, "true", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "a"]}, "1", 1),
        ({"const": True}, "true", True),
        ({"minLength": 1}, "1", "1"),
        ({"minimum": 1}, "1", 1),
        ({"allOf": [{"type": "integer"}]}, "1", 1),
        ({"$ref": "#/$defs/none"}, "1", 1),
        ({}, "1", 1),
        ({}, "{a}", "{a}"),
        (True, "NaN", "NaN"),
    ],
)
def test_arguments_have_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"flag": {"type": "boolean"}}}
    types = argument_types(parameters, "x")
    assert types is not None and json.loads(to_json(text, types)) == value


def test_a_whole_number_has_no_fraction() -> None:
    assert to_json("5.0", frozenset({"number"})) == "5"


def test_schemas_that_hold_themselves_take_no_time() -> None:
    """Each of the hundred choices leads back to all."""
    around: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"} for _ in range(100)]}
    chain = {f"c{place}": {"$ref": f"#/$defs/c{place + 1}"} for place in range(5000)}
    parameters = {"properties": {"x": around, "y": {"$ref": "#/$defs/c0"}}, "$defs": {"a": around, **chain}}
    assert argument_types(parameters, "x") == argument_types(parameters, "y") == frozenset()
    assert least_seconds(lambda: [argument_types(parameters, name) for name in "xy"], enough=0.2) < 0.2


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", "<function=book><parameter=unknown>5</parameter></function>", {"unknown": "5"}),
        ("minimax_m2", '<invoke name="book"><parameter name="unknown">[]</parameter></invoke>', {"unknown": "[]"}),
        ("deepseek_v32", _DSML % ("unknown", ' string="false"', "5"), {"unknown": 5}),
        ("deepseek_v32", _DSML % ("unknown", "", "5"), {"unknown": 5}),
        ("deepseek_v32", _DSML % ("pages", ' string="true"', "5"), {"pages": 5}),
        ("deepseek_v32", _DSML % ("title", ' string="false"', "null"), {"title": "null"}),
        ("deepseek_v32", _DSML % ("code", ' string="true"', "5"), {"code": "5"}),
        ("lfm2", "[book(tags={'a', \"b\"}, extra={'a': {1, 2}})]", {"tags": ["a", "b"], "extra": {"a": [1, 2]}}),
        ("lfm2", "[book(title='sed -n '1,2p' a.py' , pages=007)]", {"title": "sed -n '1,2p' a.py", "pages": 7}),
    ],
)
def test_values_that_the_schema_or_the_notation_leaves_open(name: str, text: str, arguments: dict[str, Any]) -> None:
    whole = CALL_FORMATS[name].opens[0] + text
    for pieces in ([whole], list(whole)):
        ((_, found),) = read(parse(name, pieces))[1]
        assert json.loads(found) == arguments


@pytest.mark.parametrize(("name", "mark"), [("kimi_k2", "<|tool_call_end|>"), ("hermes", "</tool_call>")])
def test_a_mark_ends_arguments_that_lack_a_brace(name: str, mark: str) -> None:
    whole = next(each for each in TEXTS if each.format == name) if name == "kimi_k2" else None
    text = whole.text if whole else f'<tool_call>{{"name": "book", "arguments": {{"pages": 1}}}}{mark}' * 2
    broken = text.replace("}" + mark, mark, 1) if whole else text.replace("}}" + mark, mark, 1)
    content, calls = read(parse(name, list(broken)))
    assert mark not in content and len(calls) == 2
    assert calls[0][1] + "}" == read(parse(name, [text]))[1][0][1]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=' + call.name + '>", "qwen3_coder"),
        ("<seed:tool_call>\n<function=", "seed_oss"),
        ("'<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['name'] + '\\n' + '```json'", "deepseek_v3"),
        ("'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", "glm47"),
        ("{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|python_start|>[func_name1(params_name1=params_value1)]<|python_end|>", "llama4_pythonic"),
        ('<|python_start|> {"name": function name, "parameters": dictionary of argument name}', "llama3_json"),
        ("return [func_name1(params_name1=params_value1, ...)]", "pythonic"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<steptml:invoke name=", "step3"),
        ("<|tool_call>call:", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("]<]minimax[>[", "minimax_m3"),
        ("<dots_function_call>", "dots"),
        ("<ifm|tool_call>", "k2_horizon"),
        ("<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>", "hy_v3"),
        ("<tool_calls:6f1>\n<tool_call:6f1>{name}\n<arg_key:6f1>", "hy_v4"),
        ("<|open|>call tool=<|sep|>", "kimi_k3"),
        ("<｜DSML｜ calls>", "deepseek_v41"),
        ("<|tools_prefix|>", "apertus"),
        ("<|function_call|>", "gigachat3"),
        ("<|START_ACTION|>", "cohere_command3"),
        ("<|content_invoke_tool_json|>", "inkling"),
        ("<|plamo:begin_tool_requests:plamo|>", "plamo3"),
        ('<function name="', "minicpm5"),
        ("<function_call>", "granite-20b-fc"),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    assert find_call_format(template) == name


def test_tags_have_the_end_that_a_template_shows() -> None:
    form = fit_call_format(CALL_FORMATS["hy_v4"], "'<tool_calls:6f1>' ~ '<tool_call:6f1>'")
    for plain, ended in zip(keyed_texts("hy_v4", ""), keyed_texts("hy_v4", "", end=":6f1"), strict=True):
        parser = MessageParser(MessageForm(calls=form, names=NAMES, schemas=SCHEMAS))
        assert read(parser.push(ended.text) + parser.finish()) == read(parse("hy_v4", [plain.text]))
    assert fit_call_format(CALL_FORMATS["hy_v4"], "<tool_calls>") == CALL_FORMATS["hy_v4"]


def test_other_names_of_parsers_are_those_that_there_are() -> None:
    flags = load_table()
    for name in ("qwen3_xml", "granite4", "ernie45", "hunyuan_a13b", "minimax-m2", "deepseekv31", "step3p5", "glm"):
        assert flags["--tool-call-parser"].to_own(name) in CALL_FORMATS
