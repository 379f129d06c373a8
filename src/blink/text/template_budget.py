# SPDX-License-Identifier: Apache-2.0
"""Bound what a chat template may do: it comes with the model, is a program, and must not hold a frontend for ever.

Each turn of a loop, each call and each character made are taken from a budget, and the time from a deadline; a template
that exceeds either is refused. What one operation of Python does between two of these is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A turn of a loop counts as much as so many characters: both take some tenths of a microsecond.
_STEP = 16
_STEPS_PER_LOOK = 32  # at the clock and at what is left
_SMALL_TEXT = 64  # is covered by the step around it
_FREE_CHARS = 64 << 20
_SECONDS = 2.0  # of this thread alone, so that a busy machine refuses no honest template
_CHARGE = "blink_charge"
_CONCATENATE = "blink_concatenate"


class _Budget:
    """What is left to one rendering."""

    __slots__ = ("_deadline", "_left", "_unchecked")

    def __init__(self, chars: int) -> None:
        self._left = self._unchecked = chars
        self._deadline = time.thread_time() + _SECONDS

    def spend(self, chars: int) -> None:
        self._left -= chars + _STEP
        if self._left > self._unchecked:
            return
        # The clock is a call of the system.
        self._unchecked = self._left - _STEPS_PER_LOOK * _STEP
        if self._left < 0:
            raise TemplateRuntimeError("it does too much: a loop of it may have no end")
        if time.thread_time() > self._deadline:
            raise TemplateRuntimeError(f"it takes longer than {_SECONDS:g} s: a loop of it may have no end")


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def limited(num_chars: int) -> Iterator[None]:
    """Give what is rendered in here a budget, for an input of so many characters."""
    token = _budget.set(_Budget(_FREE_CHARS + 64 * num_chars))
    try:
        yield
    finally:
        _budget.reset(token)


def _spend(chars: int) -> None:
    if (budget := _budget.get()) is not None:
        budget.spend(chars)


# Filters that take the context are never evaluated at compile time, when there is no budget.
@pass_context
def _charge(context: Context, chars: int) -> str:  # noqa: ARG001
    _spend(chars)
    return ""


@pass_context
def _concatenate(context: Context, parts: list[Any]) -> str:  # noqa: ARG001
    texts = [str(part) for part in parts]
    _spend(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _show(context: Context, value: Any) -> Any:  # noqa: ARG001
    _spend(_size(value))
    return value


def _size(value: object) -> int:
    if isinstance(value, int):
        return value.bit_length() // 8
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop and whatever grows charged to the budget of limited()."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_show, **options)
        charges: dict[str, Any] = {_CHARGE: _charge, _CONCATENATE: _concatenate}
        self.filters.update(charges)

    def instrument(self, template: nodes.Template) -> nodes.Template:
        """Return the parsed template with its charges."""
        for node in list(template.find_all(nodes.Concat)):
            # In place: what holds the node does not matter then.
            parts = nodes.List(list(node.nodes), lineno=node.lineno)
            node.nodes = [nodes.Filter(parts, _CONCATENATE, [], [], None, None, lineno=node.lineno)]
        for output in template.find_all(nodes.Output):
            chars = sum(len(part.data) for part in output.nodes if isinstance(part, nodes.TemplateData))
            if chars > _SMALL_TEXT:
                output.nodes.insert(0, _make_charge(chars, output.lineno))
        for block in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            block.body.insert(0, nodes.ExprStmt(_make_charge(0, block.lineno), lineno=block.lineno))
        for node in template.find_all(nodes.Node):
            node.set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template and charge what it returns."""
        _spend(0)
        result = super().call(__context, __obj, *args, **kwargs)
        _spend(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation whose result may be large, if the budget has room for it."""
        if operator == "*" and not (isinstance(left, int) and isinstance(right, int)):
            factors = [value if isinstance(value, int) else _size(value) for value in (left, right)]
            _spend(max(0, factors[0]) * max(0, factors[1]))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _spend(left.bit_length() * max(0, right) // 8)
        else:
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)


def _make_charge(chars: int, line: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(chars, lineno=line), _CHARGE, [], [], None, None, lineno=line)
