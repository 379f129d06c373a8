# SPDX-License-Identifier: Apache-2.0
"""Calls whose arguments stand between tags, by vLLM's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blink.structured_outputs import Parameters
from blink.text.message.element_call import Elements
from blink.text.message.format_kinds import CallFormat
from blink.text.message.tagged_call import Tags


def _qwen(open_tag: str, close_tag: str, line: str = "\n", *, keeps_space: bool = False) -> CallFormat:
    closers = ("</parameter>", "<parameter=", "</function>")
    return CallFormat(
        opens=(open_tag,),
        closes=(close_tag,),
        unmarked=("<function=",),
        tags=Tags(
            heads=tuple(f"<function=%s>~&{each}" for each in ("<parameter=", "</function>", close_tag)),
            keys=("<parameter=%k>",),
            close="</parameter>",
            ends=("</function>",),
            lines=bool(line),
            stops=closers[1:],
            outer=(close_tag, open_tag, "<function="),
            written=Parameters(begin=f"<parameter=%s>{line}", end=f"{line}</parameter>\n", stops=closers),
        ),
        keeps_space=keeps_space,
        trigger=open_tag,
        begin=open_tag + "\n<function=%s>\n",
        end="</function>\n" + close_tag,
        separator="\n",
    )


def _glm(line: str) -> CallFormat:
    return CallFormat(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        tags=Tags(
            heads=("%s~&<arg_key>", "%s~&</tool_call>"),
            keys=("<arg_key>%k</arg_key>~<arg_value>",),
            close="</arg_value>",
            ends=(),
            outer=("</tool_call>", "<tool_call>"),
            written=Parameters(
                begin=f"<arg_key>%s</arg_key>{line}<arg_value>", end=f"</arg_value>{line}", stops=("</arg_value>",)
            ),
        ),
        trigger="<tool_call>",
        begin=f"<tool_call>%s{line}",
        end="</tool_call>",
        separator="\n",
    )


def _invokes(outer: str, mark: str = "", *, says_string: bool = False, also: tuple[str, ...] = ()) -> CallFormat:
    """Return tags named invoke and parameter, with a mark before these names; also: other opening tags."""
    begin, end = f"<{mark}invoke name=", f"</{mark}invoke>"
    value, close = f"<{mark}parameter name=", f"</{mark}parameter>"
    return CallFormat(
        opens=(f"<{outer}>", *also),
        closes=(f"</{outer}>",),
        unmarked=(begin,) if says_string else (),
        keeps_space=True,
        tags=Tags(
            heads=(f'{begin}"%s">~&{value}', f'{begin}"%s">~&{end}'),
            keys=(f'{value}"%k">', f'{value}"%k" string="%w">') if says_string else (f'{value}"%k">',),
            close=close,
            ends=(end,),
            wrappers=("arguments", "input") if says_string else (),
            stops=(value, end),
            outer=(f"</{outer}>", begin),
            written=Parameters(
                begin=f'{value}"%s" string="' if says_string else f'{value}"%s">',
                text=('true">' if says_string else "", ""),
                before_json='false">' if says_string else "",
                end=f"{close}\n",
                stops=(close, value, end),
            ),
        ),
        trigger=f"<{outer}>",
        prefix=f"<{outer}>\n",
        begin=f'{begin}"%s">\n',
        end=end,
        separator="\n",
        suffix=f"\n</{outer}>",
    )


def keyed(mark: str, head: str, end: str = "", **fields: Any) -> CallFormat:
    """Return tags as GLM's in a group, with a mark before their names and an end behind; head: behind a function's."""
    open_tag, close_tag = f"<{mark}tool_call{end}>", f"</{mark}tool_call{end}>"
    group, key, value = f"{mark}tool_calls{end}", f"{mark}arg_key{end}", f"{mark}arg_value{end}"
    return CallFormat(
        opens=(f"<{group}>", open_tag),
        between=(close_tag,),
        closes=(f"</{group}>",),
        tags=Tags(
            heads=(f"%s~{head}&<{key}>", f"%s~{head}&{close_tag}"),
            keys=(
                f"<{key}>%k</{key}>~<{value}>",
                f"<{key}>%k</{key}>~<{mark}arg_type{end}>%w</{mark}arg_type{end}>~<{value}>",
            ),
            close=f"</{value}>",
            ends=(),
            outer=(close_tag, open_tag),
            written=Parameters(begin=f"<{key}>%s</{key}>\n<{value}>", end=f"</{value}>\n", stops=(f"</{value}>",)),
        ),
        trigger=f"<{group}>",
        prefix=f"<{group}>\n",
        begin=f"{open_tag}%s{head.rstrip('~')}\n",
        end=close_tag,
        separator="\n",
        suffix=f"\n</{group}>",
        **fields,
    )


_STEP_BEGIN, _STEP_VALUE, _STEP_END = "<steptml:invoke name=", "<steptml:parameter name=", "</steptml:invoke>"
_STEP_CLOSE = "</steptml:parameter>"
_MINIMAX = "]<]minimax[>["
TAGGED_FORMATS = {
    "qwen3_coder": _qwen("<tool_call>", "</tool_call>"),
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
    "step5": _qwen("<tool_call>", "</tool_call>", keeps_space=True),
    "mimo": _qwen("<tool_call>", "</tool_call>", ""),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": _invokes("minimax:tool_call"),
    "minimax_m3": CallFormat(
        opens=(f"{_MINIMAX}<tool_call>",),
        closes=(f"{_MINIMAX}</tool_call>",),
        keeps_space=True,
        elements=Elements(
            mark=_MINIMAX,
            heads=tuple(f"{_MINIMAX}<invoke name={quote}%s{quote}>" for quote in ('"', "'", "")),
            end=f"{_MINIMAX}</invoke>",
            outer=(f"{_MINIMAX}</tool_call>", f"{_MINIMAX}<invoke name="),
            written=Parameters(begin=f"{_MINIMAX}<%s>", end=f"{_MINIMAX}</%s>", stops=(_MINIMAX,)),
        ),
        trigger=f"{_MINIMAX}<tool_call>",
        prefix=f"{_MINIMAX}<tool_call>\n",
        begin=f'{_MINIMAX}<invoke name="%s">',
        end=f"{_MINIMAX}</invoke>",
        separator="\n",
        suffix=f"\n{_MINIMAX}</tool_call>",
    ),
    "deepseek_v32": _invokes("｜DSML｜function_calls", "｜DSML｜", says_string=True),
    "deepseek_v4": _invokes(
        "｜DSML｜tool_calls", "｜DSML｜", says_string=True, also=("<｜DSML｜toolcalls>", "<｜DSML｜tool>")
    ),
    "deepseek_v41": _invokes("｜DSML｜ calls", "｜DSML｜ ", says_string=True),
    "dots": replace(_invokes("dots_function_call"), checks_names=True),
    "hy_v3": keyed("", "<tool_sep>~"),
    "hy_v4": keyed("", ""),
    "k2_horizon": keyed("ifm|", "", checks_names=True, keeps_space=True),
    "kimi_k3": CallFormat(
        opens=("<|open|>tools<|sep|>",),
        closes=("<|close|>tools<|sep|>",),
        keeps_space=True,
        hidden=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tags=Tags(
            heads=tuple(
                f'<|open|>call tool="%s" index="%d"<|sep|>~&{each}'
                for each in ("<|open|>argument ", "<|close|>call<|sep|>")
            ),
            keys=('<|open|>argument key="%k" type="%w"<|sep|>',),
            close="<|close|>argument<|sep|>",
            ends=("<|close|>call<|sep|>",),
            outer=("<|close|>tools<|sep|>", "<|open|>call "),
            written=Parameters(
                begin='<|open|>argument key="%s" type="',
                text=('string"<|sep|>', ""),
                before_json='object"<|sep|>',
                end="<|close|>argument<|sep|>",
                stops=("<|close|>argument<|sep|>",),
            ),
        ),
        trigger="<|open|>tools<|sep|>",
        prefix="<|open|>tools<|sep|>",
        begin='<|open|>call tool="%s" index="1"<|sep|>',
        end="<|close|>call<|sep|>",
        separator="",
        suffix="<|close|>tools<|sep|>",
    ),
    "minicpm5": CallFormat(
        opens=(),
        unmarked=('<function name="', '<functionname="'),
        keeps_space=True,
        tags=Tags(
            heads=tuple(
                f'<function{space}name="%s">~&{each}' for space in (" ", "") for each in ("<param", "</function>")
            ),
            keys=('<param name="%k">', '<paramname="%k">'),
            close="</param>",
            ends=("</function>",),
            stops=("</function>",),
            outer=("<function",),
            verbatim=("<![CDATA[", "]]></param>"),
            wrappers=("properties", "arguments"),
            written=Parameters(
                begin='<param name="%s">', end="</param>", stops=("</param>", "</function>", "<![CDATA[")
            ),
        ),
        trigger='<function name="',
        begin='<function name="%s">',
        end="</function>",
        separator="\n",
    ),
    "step3": CallFormat(
        opens=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        between=("<｜tool_call_end｜>", "function<｜tool_sep｜>"),
        closes=("<｜tool_calls_end｜>",),
        tags=Tags(
            heads=(f'{_STEP_BEGIN}"%s">~&{_STEP_VALUE}', f'{_STEP_BEGIN}"%s">~&{_STEP_END}'),
            keys=(f'{_STEP_VALUE}"%k">',),
            close=_STEP_CLOSE,
            ends=(_STEP_END,),
            stops=(_STEP_VALUE, _STEP_END),
            outer=("<｜tool_call_end｜>", _STEP_BEGIN),
            written=Parameters(
                begin=f'{_STEP_VALUE}"%s">', end=_STEP_CLOSE, stops=(_STEP_CLOSE, _STEP_VALUE, _STEP_END)
            ),
        ),
        trigger="<｜tool_calls_begin｜>",
        prefix="<｜tool_calls_begin｜>",
        begin=f'<｜tool_call_begin｜>function<｜tool_sep｜>{_STEP_BEGIN}"%s">',
        end=f"{_STEP_END}<｜tool_call_end｜>",
        separator="",
        suffix="<｜tool_calls_end｜>",
    ),
}
