# SPDX-License-Identifier: Apache-2.0
"""Calls whose arguments stand in another notation than JSON's, by vLLM's names."""

from __future__ import annotations

from blink.structured_outputs import Parameters
from blink.text.message.format_kinds import CallFormat
from blink.text.message.literal_call import Literals
from blink.text.message.literals import PYTHON, Notation


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
            heads=("call:%s~&{", ":%s~&{"),
            notation=Notation(quotes=(quote, '"'), plain_quotes=(quote,), has_bare_texts=True),
            written=Parameters(begin="%s:", separator=",", text=(quote, quote), stops=(quote,)),
        ),
        trigger=open_mark,
        begin=open_mark + "call:%s{",
        end="}" + close_mark,
        separator="",
    )


LITERAL_FORMATS = {
    "pythonic": _python("", "", is_bare=True),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>", is_bare=True),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>", is_list=False),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}
