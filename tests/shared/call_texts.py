# SPDX-License-Identifier: Apache-2.0
"""Texts with tool calls as models of each family write them, with what they mean."""

from __future__ import annotations

from typing import Any, NamedTuple

SCHEMAS: dict[str, Any] = {
    "book": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "pages": {"type": "integer"},
            "price": {"type": "number"},
            "used": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "author": {"$ref": "#/$defs/person"},
            "code": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "extra": {},
        },
        "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    "now": {"type": "object", "properties": {}},
}
NAMES = frozenset(SCHEMAS)


class Written(NamedTuple):
    """A text, the content around its calls, and these."""

    format: str
    text: str
    content: str
    calls: list[tuple[str, Any]]


TITLE = 'War & "Peace" <1>'
BOOK = {"title": TITLE, "pages": 12, "used": True}
_CODE = {"title": "\n def f():\n\treturn '\\n'\n", "tags": ["a", "b"], "author": {"name": "é"}, "note": None}
_LITERALS = {"title": 'a\néA"', "price": -1.5, "note": None, "tags": ["x", "y"], "author": {"name": 'b"c'}}
PLAIN = '{"title": "War & \\"Peace\\" <1>", "pages": 12, "used": true}'


def invoke(mark: str, *arguments: tuple[str, str, str], name: str = "book") -> str:
    inside = "".join(
        f'<{mark}parameter name="{key}"{word}>{value}</{mark}parameter>\n' for key, word, value in arguments
    )
    return f'<{mark}invoke name="{name}">\n{inside}</{mark}invoke>'


def _qwen(name: str, tag: str) -> list[Written]:
    return [
        Written(
            name,
            f'I will look.\n\n<{tag}>\n<function=book>\n<parameter=title>\nWar & "Peace" <1>\n</parameter>\n'
            f"<parameter=pages>\n12\n</parameter>\n<parameter=used>\nTrue\n</parameter>\n</function>\n</{tag}>",
            "I will look.",
            [("book", BOOK)],
        ),
        Written(
            name,
            f"<{tag}>\n<function=book>\n<parameter=title>\n\n def f():\n\treturn '\\n'\n\n</parameter>\n"
            f'<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=author>\n{{"name": "é"}}\n</parameter>\n'
            f"<parameter=note>\nnull\n</parameter>\n</function>\n</{tag}>\n<{tag}>\n<function=now>\n</function>\n</{tag}>"
            "\nDone.",
            "\nDone.",
            [("book", _CODE), ("now", {})],
        ),
        Written(
            name,
            "<function=book><parameter=title>x</parameter><parameter=code>7b<parameter=price>-1.5e2\n</function> Ok",
            "Ok",
            [("book", {"title": "x", "code": "7b", "price": -150.0})],
        ),
        Written(
            name,
            f"<{tag}><function=book><parameter=extra>[1, {{}}]</parameter><parameter=unknown>free text</parameter>"
            "</function>",
            "",
            [("book", {"extra": [1, {}], "unknown": "free text"})],
        ),
    ]


def _glm(name: str, line: str) -> list[Written]:
    def call(*pairs: tuple[str, str], function: str = "book") -> str:
        inside = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in pairs)
        return f"<tool_call>{function}{line}{inside}</tool_call>"

    spaced = " 3 \n"
    return [
        Written(
            name,
            f"Yes.\n{call(('title', TITLE), ('pages', '12'), ('used', 'true'))}",
            "Yes.",
            [("book", BOOK)],
        ),
        Written(
            name,
            f"{call(function='now')}\n{call(('title', spaced), ('tags', '[]'), ('code', '3'))} Well",
            " Well",
            [("now", {}), ("book", {"title": spaced, "tags": [], "code": 3})],
        ),
    ]


def _deepseek(name: str, call: str) -> list[Written]:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    first, second = (
        call.replace("NAME", "book").replace("ARGS", PLAIN),
        call.replace("NAME", "now").replace("ARGS", "{}"),
    )
    return [
        Written(name, f"Sure.{begin}{first}{end}", "Sure.", [("book", BOOK)]),
        Written(name, f"{begin}{first}\n{second}{end} So", " So", [("book", BOOK), ("now", {})]),
        Written(name, first, "", [("book", BOOK)]),
    ]


def _python(name: str, before: str, behind: str, separator: str = ", ") -> list[Written]:
    book = "book(title='War & \"Peace\" <1>', pages=12, used=True)"
    return [
        Written(name, f"{before}{book}{behind}", "", [("book", BOOK)]),
        Written(
            name,
            f'{before}now(){separator}book(title="a\\n\\u00e9\\x41\\"", price=-1.5, note=None, tags=["x", \'y\',],'
            f' author={{"name": """b"c"""}}){behind}',
            "",
            [("now", {}), ("book", _LITERALS)],
        ),
    ]


def _gemma(name: str, begin: str, end: str, quote: str) -> list[Written]:
    call = f'call:book{{title:{quote}War & "Peace" <1>{quote},pages:12,used:true}}'
    return [
        Written(name, f"Let me.{begin}{call}{end}", "Let me.", [("book", BOOK)]),
        Written(
            name,
            f"{begin}call:now{{}}{end}{begin}call:book{{tags:[{quote}a\\b{quote}, {quote}c,d{quote}],"
            f"author:{{name:{quote}{quote}}},note:null}}{end}",
            "",
            [("now", {}), ("book", {"tags": ["a\\b", "c,d"], "author": {"name": ""}, "note": None})],
        ),
    ]


def _list(name: str, before: str, behind: str, key: str = "arguments") -> list[Written]:
    calls = [("book", BOOK), ("now", {})]
    text = f'{before}{{"name": "book", "{key}": {PLAIN}}}, {{"name": "now", "{key}": {{}}}}{behind}'
    return [Written(name, text, "", calls)]


def _kimi() -> list[Written]:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

    def call(name: str, arguments: str) -> str:
        return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    return [
        Written(
            "kimi_k2",
            f"I see.{begin}{call('functions.book:0', PLAIN)}{call('functions.now:1', '{}')}{end}",
            "I see.",
            [("book", BOOK), ("now", {})],
        ),
        Written("kimi_k2", f"{begin}{call('book:12', PLAIN)}{end}\nThen", "\nThen", [("book", BOOK)]),
    ]


def _step() -> list[Written]:
    def call(text: str) -> str:
        return f"<｜tool_call_begin｜>function<｜tool_sep｜>{text}<｜tool_call_end｜>"

    mark, pairs = "steptml:", (("title", "", TITLE), ("pages", "", "12"), ("used", "", "true"))
    book, now = call(invoke(mark, *pairs)), call(invoke(mark, name="now"))
    return [
        Written(
            "step3", f"<｜tool_calls_begin｜>\n{book}\n{now}\n<｜tool_calls_end｜>", "", [("book", BOOK), ("now", {})]
        ),
        Written("step3", f"So: {book}", "So:", [("book", BOOK)]),
    ]


def invokes(name: str, outer: str, mark: str = "", words: tuple[str, str] = ("", "")) -> list[Written]:
    string, other = words
    pairs = (("title", string, TITLE), ("pages", other, "12"), ("used", other, "true"))
    book, now = invoke(mark, *pairs), invoke(mark, name="now")
    return [
        Written(name, f"Fine.\n<{outer}>\n{book}\n</{outer}>", "Fine.\n", [("book", BOOK)]),
        Written(name, f"<{outer}>\n{now}\n{book}\n</{outer}>!", "!", [("now", {}), ("book", BOOK)]),
    ]


TEXTS = [
    *_qwen("qwen3_coder", "tool_call"),
    *_qwen("seed_oss", "seed:tool_call"),
    *_deepseek("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>"),
    *_deepseek("deepseek_v31", "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"),
    *(
        each
        for name, space, outer in (
            ("deepseek_v32", "", "function_calls"),
            ("deepseek_v4", "", "tool_calls"),
            ("deepseek_v41", " ", "calls"),
        )
        for each in invokes(name, f"｜DSML｜{space}{outer}", f"｜DSML｜{space}", (' string="true"', ' string="false"'))
    ),
    *_glm("glm45", "\n"),
    *_glm("glm47", ""),
    *_kimi(),
    *_python("pythonic", "[", "]"),
    *_python("llama4_pythonic", "<|python_start|>[", "]<|python_end|>"),
    *_python("llama4_pythonic", "[", "]"),
    *_python("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    *_python("olmo3", "<function_calls>", "</function_calls>", "\n"),
    *invokes("minimax_m2", "minimax:tool_call"),
    *_step(),
    *_gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *_gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    *_list("jamba", "<tool_calls>[", "]</tool_calls>"),
    *_list("minimax", "<tool_calls>\n", "\n</tool_calls>"),
    *_list("xlam", "[", "]"),
    *_list("llama3_json", "<|python_start|>", "<|python_end|>", "parameters"),
    *_list("internlm", "<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    *_list("longcat", "<longcat_tool_call>\n", "\n</longcat_tool_call>"),
]
# Texts that only look like calls.
LOOK_ALIKES = [
    ("qwen3_coder", "Write <function=book> and </function>, or <tool_call> alone."),
    ("qwen3_coder", "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=book"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>none</seed:tool_call>"),
    ("glm45", "<tool_call>no call</tool_call>"),
    ("glm47", "<tool_call><arg_key>a</arg_key></tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>book<｜tool▁sep｜>text"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="">\n</｜DSML｜function_calls>'),
    ("kimi_k2", "<|tool_calls_section_begin|>functions.book:0 {}<|tool_calls_section_end|>"),
    ("pythonic", "[1, 2] is a list, [book(title='x')] is none"),
    ("pythonic", "[other(title='x')]"),
    ("pythonic", "[book('x')]"),
    ("pythonic", "book(title='x')"),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>"),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("step3", "<｜tool_calls_begin｜>function<｜tool_sep｜>book"),
    ("gemma4", "<|tool_call>call book<tool_call|>"),
    ("xlam", '[{"name": "other", "arguments": {}}]'),
]
