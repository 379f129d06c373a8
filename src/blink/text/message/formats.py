# SPDX-License-Identifier: Apache-2.0
"""The ways in which models write tool calls and reasoning, by vLLM's names, and which of them a template speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes its calls.

    A message's calls are prefix, calls with the separator between them, suffix; a call is begin(name), the JSON of its
    arguments, end. So they are forced; what a model writes of itself may deviate from it, and is read with patience.
    """

    opens: tuple[str, ...]  # before calls
    closes: tuple[str, ...] = ()
    is_bare: bool = False  # an answer may begin with a call, without a marker
    has_prefixed_names: bool = False  # name{"argument": ...} too
    arguments_mark: str = "[ARGS]"  # that may stand behind such a name
    id_chars: int = 0  # of a call's id, where the template insists; 0: any
    trigger: str  # what nothing but a call begins with
    prefix: str = ""
    begin: str = '{"name": "%s", "arguments": '
    end: str = "}"
    separator: str = ", "
    suffix: str = ""
    uses_harmony: bool = False  # in messages of their own, between special tokens (blink.text.message.harmony)

    @property
    def is_list(self) -> bool:
        """Say whether several calls share one marker."""
        return bool(self.prefix) or self.is_bare


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around reasoning."""

    open: str
    close: str
    begins_inside: bool = False  # the model reasons without writing the opening tag
    uses_harmony: bool = False  # in messages of its own, as calls are


HERMES = CallFormat(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": "%s", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)
HARMONY = CallFormat(opens=(), trigger="", uses_harmony=True)
HARMONY_REASONING = ReasoningFormat("", "", uses_harmony=True)
CALL_FORMATS = {
    "hermes": HERMES,
    "llama3_json": CallFormat(
        opens=("<|python_tag|>",),
        is_bare=True,
        trigger='{"name": "',
        begin='{"name": "%s", "parameters": ',
        separator="; ",
    ),
    "openai": HARMONY,
    "mistral": CallFormat(
        opens=("[TOOL_CALLS]",),
        has_prefixed_names=True,
        id_chars=9,
        trigger="[TOOL_CALLS]",
        prefix="[TOOL_CALLS] [",
        suffix="]",
    ),
    "granite": CallFormat(
        opens=("<|tool_call|>", "<tool_call>"),
        trigger="<|tool_call|>",
        prefix="<|tool_call|>[",
        suffix="]",
    ),
    "phi4_mini_json": CallFormat(
        opens=("functools[", "<|tool_call|>"),
        closes=("<|/tool_call|>",),
        trigger="functools[",
        prefix="functools[",
        suffix="]",
    ),
}
REASONING_FORMATS = {
    "openai_gptoss": HARMONY_REASONING,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
}

# Calls whose arguments are no JSON: Qwen 3 Coder's and GLM's stand in the same tags as Hermes'.
_OTHER_FORMATS = ("<function=", "<arg_key>")
_SIGNS = (
    ("openai", ("<|channel|>commentary",)),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools[", "<|/tool|>", "<|/tool_call|>")),
    ("granite", ("<|tool_call|>",)),
    ("llama3_json", ("<|python_tag|>", '"parameters": dictionary of argument name')),
)


def find_call_format(template: str) -> str:
    """Return the name of the format that a chat template speaks, empty for none that is known."""
    if any(sign in template for sign in _OTHER_FORMATS):
        return ""
    for name, signs in _SIGNS:
        if any(sign in template for sign in signs):
            return name
    return ""
