# SPDX-License-Identifier: Apache-2.0
"""Calls whose arguments are no JSON object, by vLLM's names."""

from __future__ import annotations

from blink.structured_outputs import Parameters
from blink.text.message.format_kinds import CallFormat
from blink.text.message.literal_call import Literals
from blink.text.message.literals import PYTHON, Notation
from blink.text.message.tagged_call import Tags


def _qwen(open_tag: str, close_tag: str) -> CallFormat:
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
            lines=True,
            stops=closers[1:],
            outer=(close_tag, open_tag, "<function="),
            written=Parameters(begin="<parameter=%s>\n", end="\n</parameter>\n", stops=closers),
        ),
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


def _invokes(outer: str, mark: str = "", *, says_string: bool = False) -> CallFormat:
    """Return tags named invoke and parameter, with a mark before these names."""
    begin, end = f"<{mark}invoke name=", f"</{mark}invoke>"
    value, close = f"<{mark}parameter name=", f"</{mark}parameter>"
    return CallFormat(
        opens=(f"<{outer}>",),
        closes=(f"</{outer}>",),
        tags=Tags(
            heads=(f'{begin}"%s">~&{value}', f'{begin}"%s">~&{end}'),
            keys=(f'{value}"%k" string="%w">' if says_string else f'{value}"%k">',),
            close=close,
            ends=(end,),
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


def _python(open_mark: str, close_mark: str, *, is_bare: bool = False, is_list: bool = True) -> CallFormat:
    """Return Python's calls; is_bare: an answer may be a list of them without marks."""
    return CallFormat(
        opens=(open_mark,) if open_mark else (),
        closes=(close_mark,) if close_mark else (),
        bare_starts="[" if is_bare else "",
        literals=Literals(
            heads=("%s~&(~)", "%s~&(~%v~="),
            notation=PYTHON,
            written=Parameters(begin="%s=", separator=", ", text=None, is_python=True),
        ),
        trigger=open_mark,
        prefix=open_mark + ("[" if is_list else ""),
        begin="%s(",
        end=")",
        separator=", " if is_list else "\n",
        suffix=("]" if is_list else "") + close_mark,
    )


def _gemma(open_mark: str, close_mark: str, quote: str) -> CallFormat:
    return CallFormat(
        opens=(open_mark,),
        closes=(close_mark,),
        literals=Literals(
            heads=("call:%s~&{",),
            notation=Notation(quotes=(quote, '"'), plain_quotes=(quote,), has_bare_texts=True),
            written=Parameters(begin="%s:", separator=",", text=(quote, quote), stops=(quote,)),
        ),
        trigger=open_mark,
        begin=open_mark + "call:%s{",
        end="}" + close_mark,
        separator="",
    )


_STEP_BEGIN, _STEP_VALUE, _STEP_END = "<steptml:invoke name=", "<steptml:parameter name=", "</steptml:invoke>"
_STEP_CLOSE = "</steptml:parameter>"
OTHER_FORMATS = {
    "qwen3_coder": _qwen("<tool_call>", "</tool_call>"),
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": _invokes("minimax:tool_call"),
    "deepseek_v32": _invokes("｜DSML｜function_calls", "｜DSML｜", says_string=True),
    "deepseek_v4": _invokes("｜DSML｜tool_calls", "｜DSML｜", says_string=True),
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
    "pythonic": _python("", "", is_bare=True),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>", is_bare=True),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>", is_list=False),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}
