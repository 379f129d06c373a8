# SPDX-License-Identifier: Apache-2.0
"""Render chat messages with the model's Jinja template, in a sandbox with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from blink.errors import BadRequestError, ConfigError
from blink.models.fields import one_line
from blink.text.template_budget import Budget, BudgetedContext, room
from blink.text.template_sandbox import BudgetedEnvironment
from blink.text.template_traits import TemplateTraits, ToolsPlace, probe_traits

_MAX_CHARS = 1 << 20  # of a template: those of today have some 20,000
_MAX_REASON = 1 << 12  # characters of what a template says
# Marks where the last message ends; the space at its end shows whether the template strips messages.
_END_MARK = "\ue000END-OF-MESSAGE\ue000 "


class _GenerationBlock(Extension):
    """Render the body of {% generation %}, a tag that only marks text for training."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template; `special_tokens` are the variables like bos_token that it may use.

        Raises:
            ConfigError: the template is malformed.
        """
        environment = BudgetedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        if len(source) > _MAX_CHARS:
            raise ConfigError(f"The chat template has {len(source)} characters, more than {_MAX_CHARS}.")
        try:
            parsed = environment.parse(source)
            self._mentioned_place: ToolsPlace = _mentioned_place(parsed)
            environment.instrument(parsed)
            code = environment.compile(parsed)
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            reason = one_line(jinja2.TemplateError(error.message))
            raise ConfigError(f"The chat template is malformed: line {error.lineno}: {reason}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # from Python's compiler
            raise ConfigError(f"The chat template is too large or nested too deeply ({one_line(error)}).") from error
        self._special_tokens = dict(special_tokens)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Return what the template shows and what it refuses."""
        return probe_traits(
            lambda messages, variables: self.render(messages, add_generation_prompt=False, variables=variables),
            self._mentioned_place,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation; `continue_final_message` leaves the last message open.

        Raises:
            BadRequestError: the template refuses the messages.
        """
        names = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        if continue_final_message:
            final = messages[-1]
            messages = [*messages[:-1], {**final, "content": (final.get("content") or "") + _END_MARK}]
        context = self._template.new_context(
            {**names, "messages": messages, "add_generation_prompt": add_generation_prompt}
        )
        assert isinstance(context, BudgetedContext)
        context.budget = Budget(messages, names["tools"], variables)
        try:
            parts = list(self._template.root_render_func(context))
            context.budget.spend(room(*parts))
            text = "".join(parts)
        except Exception as error:  # templates are programs: a message they did not foresee may raise anything
            reason = str(error)[:_MAX_REASON]
            raise BadRequestError(f"The chat template refused the messages: {reason}", "messages") from error
        return _cut_at_mark(text) if continue_final_message else text


def _mentioned_place(template: nodes.Template) -> ToolsPlace:
    """Say where a template's text mentions tools."""
    if any(node.name == "tools" for node in template.find_all(nodes.Name)):
        return "variable"
    items = [node.arg for node in template.find_all(nodes.Getitem)]
    by_item = any(isinstance(item, nodes.Const) and item.value == "tools" for item in items)
    by_attribute = any(node.attr == "tools" for node in template.find_all(nodes.Getattr))
    return "message" if by_item or by_attribute else "none"


def _cut_at_mark(text: str) -> str:
    """Return the text up to the end of the last message, stripped if the template strips its messages."""
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise BadRequestError("The chat template does not show the final message.", "continue_final_message")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
