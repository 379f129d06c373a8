# SPDX-License-Identifier: Apache-2.0
"""The tests and functions that chat templates of models use, each with what it spends before it runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, pass_context
from jinja2.sandbox import safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from blink.text.template_budget import ITEM, BudgetedContext, refuse
from blink.text.template_filters import of_text
from blink.text.template_methods import is_number, spend_case

Function = Callable[..., Any]
_MAX_PATTERN = 256
_MAX_MESSAGE = 1 << 12


def _compared(function: Function) -> Function:
    """Return a test that compares for templates."""

    @pass_context
    def run(context: BudgetedContext, /, left: Any, right: Any) -> bool:
        return function(context.budget.operand(left), context.budget.operand(right))

    return run


@pass_context
def _contained(context: BudgetedContext, value: Any, seq: Any) -> bool:
    return context.budget.operand(value) in context.budget.container(seq)


def _of_remainder(function: Function) -> Function:
    def run(value: Any, *args: Any) -> bool:
        if not is_number(value):  # a text would be a format
            raise TypeError(f"a {type(value).__name__} is no number")
        return function(value, *args)

    return run


@pass_context
def _raise_exception(context: BudgetedContext, message: Any) -> NoReturn:
    raise TemplateError(context.budget.text(message)[:_MAX_MESSAGE])


@pass_context
def _strftime_now(context: BudgetedContext, pattern: str) -> str:
    context.budget.spend(ITEM)
    if len(pattern) > _MAX_PATTERN:
        refuse(f"a form of date has more than {_MAX_PATTERN} letters")
    return datetime.now().strftime(pattern)


@pass_context
def _range(context: BudgetedContext, *args: int) -> range:
    context.budget.spend(ITEM)
    return safe_range(*args)


@pass_context
def _namespace(context: BudgetedContext, /, *args: Any, **kwargs: Any) -> Namespace:
    return Namespace(_dict(context, *args, **kwargs))


@pass_context
def _dict(context: BudgetedContext, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    if not all(isinstance(each, dict) for each in args):  # pairs might have keys of any kind
        raise TypeError("a dict is made of another one and of names")
    context.budget.spend(8 * ITEM + 2 * ITEM * (len(kwargs) + sum(map(len, args))))
    return dict(*args, **kwargs)


ALLOWED_FUNCTIONS: dict[str, Function] = {
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}


_COMPARING = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
)  # fmt: skip
_OF_REMAINDERS = ("divisibleby", "even", "odd")
_CHEAP = (
    "boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none", "number",
    "sameas", "sequence", "string", "true", "undefined",
)  # fmt: skip
ALLOWED_TESTS: dict[str, Function] = {
    **{name: TESTS[name] for name in _CHEAP},
    **{name: _compared(TESTS[name]) for name in _COMPARING},
    **{name: _of_remainder(TESTS[name]) for name in _OF_REMAINDERS},
    **{name: of_text(TESTS[name], spend_case) for name in ("lower", "upper")},
    "in": _contained,
}
