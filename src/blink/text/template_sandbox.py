# SPDX-License-Identifier: Apache-2.0
"""The environment of chat templates: each of their operations spends from the rendering's budget before it runs.

What a template may do is a list, of filters, tests, functions and methods; all else is refused. Where jinja lets a
template's operations run as they are (comparisons, slices, what loops write), charges are put into the parsed template.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blink.text.template_budget import (
    ITEM,
    SCALARS,
    SMALL_TEXT,
    BudgetedContext,
    check_key,
    check_number,
    refuse,
    room,
    size,
)
from blink.text.template_filters import ALLOWED_FILTERS
from blink.text.template_functions import ALLOWED_FUNCTIONS, ALLOWED_TESTS
from blink.text.template_methods import (
    find_cost,
    is_number,
    spend_fields,
    spend_format,
)

_MACRO = 1 << 10  # bytes that a macro takes
_CALLABLE = (Macro, LoopContext, BlockReference, Undefined)
_SCOPES = ("_loop_vars", "_block_vars")  # of variables, which jinja gives to functions that take the context
_LOOP_METHODS = ("changed", "cycle")
_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)


@pass_context
def _charge(context: BudgetedContext, num_bytes: int) -> str:
    if type(num_bytes) is not int or num_bytes < 0:
        refuse("this is no number of bytes")
    context.budget.spend(num_bytes)
    return ""


@pass_context
def _concatenate(context: BudgetedContext, parts: list[Any]) -> str:
    budget = context.budget
    texts = [budget.text(part) for part in parts]
    budget.spend(ITEM + room(*texts))
    return "".join(texts)


@pass_context
def _show(context: BudgetedContext, value: Any) -> str:
    text = value if type(value) is str else context.budget.text(value)
    context.budget.spend(size(text))
    return text


@pass_context
def _slice(context: BudgetedContext, value: Any) -> Any:
    if isinstance(value, str):
        context.budget.spend(ITEM + size(value))
    elif isinstance(value, (list, tuple)):
        context.budget.spend(ITEM + 8 * len(value))
    return value


@pass_context
def _iterate(context: BudgetedContext, value: Any) -> Any:
    if hasattr(type(value), "__len__"):
        context.budget.spend(ITEM * len(value))
    return value


@pass_context
def _operand(context: BudgetedContext, value: Any) -> Any:
    kind = type(value)
    if kind in SCALARS and (kind is not str or len(value) <= SMALL_TEXT):
        return value
    return context.budget.operand(value)


@pass_context
def _container(context: BudgetedContext, value: Any) -> Any:
    return value if type(value) is dict else context.budget.operand(value)


@pass_context
def _key(context: BudgetedContext, value: Any) -> Any:
    del context
    return check_key(value)


# Filters that take the context are never evaluated at compile time, when there is no budget. A template may call them.
_CHARGES: dict[str, Callable[..., Any]] = {
    f"blink{each.__name__}": each
    for each in (_charge, _concatenate, _slice, _iterate, _operand, _container, _key)
}  # fmt: skip


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which whatever takes time or memory spends from the context's budget."""

    context_class = BudgetedContext
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_show, **options)
        self.filters = {**ALLOWED_FILTERS, **_CHARGES}
        self.tests = dict(ALLOWED_TESTS)
        self.globals = dict(ALLOWED_FUNCTIONS)
        self._functions = frozenset(ALLOWED_FUNCTIONS.values())

    def instrument(self, template: nodes.Template) -> nodes.Template:
        """Return the parsed template with its charges.

        Raises:
            TemplateSyntaxError: it escapes for HTML.
        """
        if (escaping := template.find(nodes.EvalContextModifier)) is not None:
            raise TemplateSyntaxError("no template may escape for HTML", escaping.lineno)
        for node in list(template.find_all((nodes.Expr, nodes.Pair))):
            _guard(node)
        for node in list(template.find_all((*_BODIES, nodes.Output))):
            if isinstance(node, nodes.Output):
                if (chars := _count_chars(node)) > SMALL_TEXT:
                    node.nodes.insert(0, _make_charge(4 * chars, node.lineno))
                continue
            if isinstance(node, nodes.For) and node.test is not None:
                node.iter = _wrap(node.iter, _iterate)
            charge = _make_charge(sum(map(_weigh, node.body)), node.lineno)
            node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        for node in template.find_all(nodes.Node):
            node.set_environment(self)
        return template

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template, of the list of those allowed, or a method of a value."""
        budget, kind = __context.budget, type(__obj)
        if kind in _CALLABLE or (kind is types.FunctionType and __obj in __self._functions):
            budget.spend(ITEM * (1 + len(args)))
            return __context.call(__obj, *args, **kwargs)
        for name in _SCOPES:
            kwargs.pop(name, None)
        if kind is _Format:
            return __obj.run(budget, args, kwargs)
        if kind is not types.BuiltinMethodType and kind is not types.MethodType:
            refuse(f"no template may call a {kind.__name__}")
        owner, name = __obj.__self__, __obj.__name__
        if isinstance(owner, LoopContext) and name in _LOOP_METHODS:
            budget.weigh(args)
        else:
            find_cost(owner, name)(budget, owner, *args, **kwargs)
        return __obj(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation, if the budget has room for its result."""
        budget = context.budget
        if operator == "+" and type(left) is str and type(right) is str:
            num_bytes = len(left) + len(right)
            budget.spend(num_bytes if left.isascii() and right.isascii() else 4 * num_bytes)
            return left + right
        if isinstance(left, str) or isinstance(right, str):
            if operator == "+" and isinstance(right, str) and isinstance(left, str):
                budget.spend(room(left, right))
            elif operator == "%" and isinstance(left, str):
                spend_format(budget, left, right)
            elif operator == "*":
                budget.spend(size(left if isinstance(left, str) else right) * _count(right, left))
        elif is_number(left) and is_number(right):
            budget.spend(0)
            if operator == "**":
                _check_power(left, right)
            return check_number(self.binop_table[operator](left, right))
        elif isinstance(left, (list, tuple)) or isinstance(right, (list, tuple)):
            if operator == "+" and type(left) is type(right):
                budget.spend(ITEM + 8 * (len(left) + len(right)))
            elif operator == "*":
                budget.spend(8 * len(left if isinstance(left, (list, tuple)) else right) * _count(right, left))
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            refuse(f"{operator} is for numbers, texts and lists")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Return what runs in place of a text's format and format_map."""
        run = super().wrap_str_format(value)
        return _Format(value.__self__, run) if run is not None else None


class _Format:
    """The method format or format_map of a text."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self._text, self._function = text, function

    def run(self, budget: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the text with the values put in."""
        spend_fields(budget, self._text, [args, kwargs])
        return self._function(*args, **kwargs)


def _count(*factors: Any) -> int:
    """Return how often a text or list is to be repeated; once where no factor is an integer."""
    return next((max(0, factor) for factor in factors if isinstance(factor, int)), 1)


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * 64:
        refuse("a power has more than 64 bits")


def _guard(node: nodes.Node) -> None:
    """Let what is below an expression be charged before the expression is computed."""
    if isinstance(node, nodes.Concat):
        # In place: what holds the node does not matter then.
        parts = nodes.List(list(node.nodes), lineno=node.lineno)
        node.nodes = [_wrap(parts, _concatenate)]
    elif isinstance(node, nodes.Compare):
        _guard_comparison(node)
    elif isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            node.node = _wrap(node.node, _slice)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _wrap(node.arg, _key)
    elif isinstance(node, nodes.Pair) and not isinstance(node.key, nodes.Const):
        node.key = _wrap(node.key, _key)


def _guard_comparison(node: nodes.Compare) -> None:
    last = node.ops[-1]
    looks_inside = last.op in ("in", "notin")
    if len(node.ops) == 1:
        if looks_inside and (_is_constant(last.expr) or isinstance(node.expr, nodes.Const)):
            if not _is_constant(last.expr):
                last.expr = _wrap(last.expr, _container)
            return
        if not looks_inside and (isinstance(node.expr, nodes.Const) or isinstance(last.expr, nodes.Const)):
            return  # takes no longer than the constant is
    node.expr = _wrap(node.expr, _operand)
    for op in node.ops:
        op.expr = _wrap(op.expr, _container if op.op in ("in", "notin") else _operand)


def _is_constant(node: nodes.Expr) -> bool:
    """Say whether an expression is a constant, or a list of some."""
    return isinstance(node, nodes.Const) or (
        isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
    )


def _weigh(node: nodes.Node) -> int:
    """Return the bytes that the literals and the small texts below a node take, without bodies of their own."""
    if isinstance(node, _BODIES):
        return _MACRO
    if isinstance(node, nodes.Output):
        chars = _count_chars(node)
        own = 4 * chars if chars <= SMALL_TEXT else 0
    else:
        own = ITEM + 16 * len(node.items) if isinstance(node, _LITERALS) else 0
    return own + sum(map(_weigh, node.iter_child_nodes()))


def _count_chars(output: nodes.Output) -> int:
    return sum(len(part.data) for part in output.nodes if isinstance(part, nodes.TemplateData))


def _wrap(node: nodes.Node, charge: Callable[..., Any]) -> nodes.Filter:
    return nodes.Filter(node, f"blink{charge.__name__}", [], [], None, None, lineno=node.lineno)


def _make_charge(num_bytes: int, line: int) -> nodes.Filter:
    return _wrap(nodes.Const(num_bytes, lineno=line), _charge)
