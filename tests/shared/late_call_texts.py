# SPDX-License-Identifier: Apache-2.0
"""Texts with tool calls as models write them that came later than those of call_texts.py."""

from __future__ import annotations

from call_texts import BOOK, PLAIN, TITLE, Written, invokes


def keyed_texts(name: str, mark: str, head: str = "", end: str = "") -> list[Written]:
    """Return texts with tags as GLM's in a group."""

    def call(function: str, *pairs: tuple[str, str]) -> str:
        inside = "".join(
            f"<{mark}arg_key{end}>{key}</{mark}arg_key{end}>\n<{mark}arg_value{end}>{value}</{mark}arg_value{end}>\n"
            for key, value in pairs
        )
        return f"<{mark}tool_call{end}>{function}{head}\n{inside}</{mark}tool_call{end}>"

    book = call("book", ("title", TITLE), ("pages", "12"), ("used", "true"))
    first, last = f"<{mark}tool_calls{end}>", f"</{mark}tool_calls{end}>"
    return [
        Written(name, f"Good.{first}\n{book}\n{last}", "Good.", [("book", BOOK)]),
        Written(name, f"{first}\n{call('now')}\n{book}{last}", "", [("now", {}), ("book", BOOK)]),
    ]


def _typed_key(key: str, kind: str, value: str) -> str:
    return f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{kind}</ifm|arg_type><ifm|arg_value>{value}</ifm|arg_value>"


def _kimi_k3() -> list[Written]:
    def call(name: str, place: int, *arguments: tuple[str, str, str]) -> str:
        inside = "".join(
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
            for key, kind, value in arguments
        )
        return f'<|open|>call tool="{name}" index="{place}"<|sep|>{inside}<|close|>call<|sep|>'

    book = call("book", 1, ("title", "string", TITLE), ("pages", "number", "12"), ("used", "boolean", "true"))
    begin, end = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    reply = "<|open|>response<|sep|>Let us see.<|close|>response<|sep|>"
    return [
        Written("kimi_k3", f"{reply}{begin}{book}{end}", "Let us see.", [("book", BOOK)]),
        Written("kimi_k3", f"{begin}{book}{call('now', 2)}{end}", "", [("book", BOOK), ("now", {})]),
        Written(
            "kimi_k3",
            f"{begin}{call('book', 1, ('code', 'string', '7'), ('extra', 'object', '{}'))}{end}",
            "",
            [("book", {"code": "7", "extra": {}})],
        ),
    ]


def _minicpm() -> list[Written]:
    return [
        Written(
            "minicpm5",
            'I look. <function name="book"><param name="title"><![CDATA[War & "Peace" <1>]]></param>'
            '<param name="pages">12</param><param name="used">True</param></function>',
            "I look. ",
            [("book", BOOK)],
        ),
        Written(
            "minicpm5",
            '<function name="now"></function>\n<functionname="book"><paramname="title"> x</param>'
            '<param name="note"><![CDATA[ </param> ]]></param></function> Done',
            "Done",
            [("now", {}), ("book", {"title": " x", "note": " </param> "})],
        ),
    ]


def _minimax_m3() -> list[Written]:
    mark = "]<]minimax[>["

    def element(name: str, inside: str) -> str:
        return f"{mark}<{name}>{inside}{mark}</{name}>"

    def call(name: str, inside: str) -> str:
        return f'{mark}<invoke name="{name}">{inside}{mark}</invoke>'

    book = call("book", element("title", TITLE) + element("pages", "12") + element("used", "true"))
    tags = element("item", "a") + element("item", "b")
    more = element("extra", element("seen", "1") + element("seen", "2") + element("by", element("name", "x")))
    whole = element("tags", tags) + element("author", element("name", "é")) + element("note", "null")
    return [
        Written("minimax_m3", f"Well. \n{mark}<tool_call>\n{book}\n{mark}</tool_call>", "Well. \n", [("book", BOOK)]),
        Written(
            "minimax_m3",
            f"{mark}<tool_call>\n{call('now', '')}\n{call('book', whole + more)}\n{mark}</tool_call>",
            "",
            [
                ("now", {}),
                (
                    "book",
                    {
                        "tags": ["a", "b"],
                        "author": {"name": "é"},
                        "note": None,
                        "extra": {"seen": ["1", "2"], "by": {"name": "x"}},
                    },
                ),
            ],
        ),
    ]


def _plamo(*calls: tuple[str, str]) -> str:
    def mark(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    inside = "".join(
        f"{mark('begin_tool_request')}{mark('begin_tool_name')}{name}{mark('end_tool_name')}"
        f"{mark('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>{arguments}"
        f"{mark('end_tool_arguments')}{mark('end_tool_request')}"
        for name, arguments in calls
    )
    return f"Yes.{mark('begin_tool_requests')}{inside}{mark('end_tool_requests')}"


LATE_TEXTS = [
    *invokes("dots", "dots_function_call"),
    Written(
        "dots",
        '<dots_function_call>{"name": "now", "arguments": {}}</dots_function_call>\nSo.',
        "\nSo.",
        [("now", {})],
    ),
    *(
        Written(
            "deepseek_v4",
            f'<｜DSML｜invoke name="book"><｜DSML｜parameter name="input" string="{word}">{text}</｜DSML｜parameter>'
            f"{more}</｜DSML｜invoke></｜DSML｜tool_calls> So",
            " So",
            [("book", arguments)],
        )
        for word, text, more, arguments in (
            ("false", PLAIN, "", BOOK),
            ("true", ' {"pages": 1} ', "", {"pages": 1}),
            ("true", '{"other": 1}', "", {"input": '{"other": 1}'}),
            ("true", "words", "", {"input": "words"}),
            (
                "true",
                "{}",
                '<｜DSML｜parameter name="pages">2</｜DSML｜parameter>',
                {"input": "{}", "pages": 2},
            ),
        )
    ),
    *_minimax_m3(),
    *_minicpm(),
    *_kimi_k3(),
    *keyed_texts("hy_v3", "", "<tool_sep>"),
    *keyed_texts("hy_v4", ""),
    *keyed_texts("k2_horizon", "ifm|"),
    Written(
        "k2_horizon",
        "Before <ifm|tool_calls><ifm|tool_call>book"
        f"{_typed_key('code', 'string', '7')}{_typed_key('tags', 'array[string]', '[]')}"
        '</ifm|tool_call>\n<ifm|tool_call>{"name": "now", "arguments": {}}</ifm|tool_call></ifm|tool_calls> after',
        "Before  after",
        [("book", {"code": "7", "tags": []}), ("now", {})],
    ),
    Written(
        "mimo",
        "<tool_call><function=book><parameter=title>\nx\n</parameter><parameter=pages>1</parameter></function></tool_call>",
        "",
        [("book", {"title": "\nx\n", "pages": 1})],
    ),
    Written(
        "step5",
        "So:\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "So:\n",
        [("now", {}), ("now", {})],
    ),
    Written(
        "apertus",
        f'Yes.<|tools_prefix|>[{{"book": {PLAIN}}}, {{"now": {{}}}}]<|tools_suffix|>',
        "Yes.",
        [("book", BOOK), ("now", {})],
    ),
    Written(
        "gigachat3",
        f'Yes.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "book", "arguments": {PLAIN}}}</s>',
        "Yes.",
        [("book", BOOK)],
    ),
    Written("gigachat3", f'<|function_call|>{{"name": "book", "arguments": {PLAIN}}}', "", [("book", BOOK)]),
    Written(
        "granite-20b-fc",
        f'<function_call> {{"name": "book", "arguments": {PLAIN}}}\n'
        '<function_call> {"name": "now", "arguments": {}}',
        "",
        [("book", BOOK), ("now", {})],
    ),
    Written(
        "granite4",
        'One: \n<tool_call> {"name": "now", "arguments": "{}"} </tool_call> two: \n '
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        "One: \n two: \n ",
        [("now", {}), ("now", {}), ("now", {})],
    ),
    Written(
        "cohere_command3",
        f'<|START_TEXT|>Yes.<|END_TEXT|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "book", '
        f'"parameters": {PLAIN}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        "Yes.",
        [("book", BOOK), ("now", {})],
    ),
    Written(
        "inkling",
        "<|message_model|><|content_text|>Yes.<|end_message|><|message_model|><|content_invoke_tool_json|>"
        f'{{"name": "book", "args": {PLAIN}}}<|end_message|><|message_model|><|content_invoke_tool_json|>'
        '{"name":"now","args":{}}<|content_model_end_sampling|>',
        "Yes.",
        [("book", BOOK), ("now", {})],
    ),
    Written("plamo3", _plamo(("book", PLAIN), ("now", "{}")), "Yes.", [("book", BOOK), ("now", {})]),
]
# Texts that only look like calls.
LATE_LOOK_ALIKES = [
    ("apertus", '<|tools_prefix|>["book"]<|tools_suffix|>'),
    ("dots", '<dots_function_call><invoke name="other"></invoke>'),
    ("k2_horizon", "<ifm|tool_calls><ifm|tool_call>other</ifm|tool_call></ifm|tool_calls>"),
    ("k2_horizon", "Before <ifm|tool_calls><ifm|tool_call>book"),
    ("hy_v3", "<tool_calls>\n<tool_call>now</tool_call>\n</tool_calls>"),
    ("kimi_k3", "<|open|>tools<|sep|>none<|close|>tools<|sep|>"),
    ("minicpm5", '<function name="other"><param name="x">1</param></function>'),
    ("minicpm5", '<function name="book"><p>1</p></function>'),
    ("minimax_m3", "]<]minimax[>[<tool_call>none]<]minimax[>[</tool_call>"),
    ("gigachat3", "function call<|role_sep|>\nnone"),
    ("cohere_command3", "<|START_ACTION|>none<|END_ACTION|>"),
]
