# SPDX-License-Identifier: Apache-2.0
"""The filters that chat templates of models use, each with what it spends before it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Undefined, filters, pass_context
from markupsafe import Markup, escape

from blink.text.template_budget import (
    ESCAPE_GROWTH,
    ITEM,
    SCALARS,
    Budget,
    BudgetedContext,
    bytes_per_char,
    check_key,
    check_number,
    refuse,
    size,
)
from blink.text.template_methods import (
    Cost,
    check_width,
    count_lines,
    is_number,
    spend_case,
    spend_format,
    spend_join,
    spend_replace,
    spend_search,
)

Function = Callable[..., Any]
_JSON_GROWTH = 6  # a control character becomes six
_JSON_STEP = 2 * ITEM  # json without its C encoder, which does not indent
_MAX_INDENT = 16
_MAX_ATTRIBUTE = 256  # letters
_MAX_PRECISION = 32
_MAX_DIGITS = 400  # of a text that is read as a number


def of_text(function: Function, cost: Cost) -> Function:
    """Return a filter of a text for templates."""

    @pass_context
    def run(context: BudgetedContext, /, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        text = value if type(value) is str else budget.text(value)
        cost(budget, text, *args, **kwargs)
        return function(text, *args, **kwargs)

    return run


def _of_items(function: Function, cost: Cost) -> Function:
    """Return a filter of a list, and of the context, for templates; it returns a list."""

    @pass_context
    def run(context: BudgetedContext, /, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        items = context.budget.items(value)
        cost(context.budget, items, *args, **kwargs)
        return list(function(context, items, *args, **kwargs))

    return run


def _of_number(function: Function) -> Function:
    """Return a filter that makes a number for templates."""

    @pass_context
    def run(context: BudgetedContext, /, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.budget.spend(0)
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            refuse(f"a number has more than {_MAX_DIGITS} digits")
        return check_number(function(value, *args, **kwargs))

    return run


def _free(function: Function) -> Function:
    """Return a filter that takes one step, whatever it is given."""

    @pass_context
    def run(context: BudgetedContext, /, *args: Any, **kwargs: Any) -> Any:
        context.budget.spend(0)
        return function(*args, **kwargs)

    return run


def _check_attribute(attribute: Any) -> None:
    if isinstance(attribute, str) and len(attribute) > _MAX_ATTRIBUTE:
        refuse("an attribute has a very long name")


def _spend_each(budget: Budget, items: list[Any], *args: Any, **kwargs: Any) -> None:
    _check_attribute(args[0] if args else kwargs.get("attribute"))
    budget.spend(ITEM * len(items))


def _spend_sorting(budget: Budget, items: Any, *args: Any, **kwargs: Any) -> None:
    for each in (*args, *kwargs.values()):
        _check_attribute(each)
    before = budget.left
    budget.weigh(items)
    budget.spend((before - budget.left) * (len(items).bit_length() >> 1))


def _spend_indent(budget: Budget, text: str, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    del first, blank
    lines = count_lines(text)
    indention = width if isinstance(width, str) else " " * check_width(width)
    budget.spend(bytes_per_char(text, indention) * (len(text) + (lines + 1) * len(indention)) + 2 * ITEM * lines)


def _spend_title(budget: Budget, text: str) -> None:
    spend_case(budget, text)
    budget.spend(32 * len(text))  # the words are found and made one by one


def _sort(context: BudgetedContext, items: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return filters.do_sort(context.environment, items, *args, **kwargs)


def _unique(
    context: BudgetedContext, items: list[Any], case_sensitive: bool = False, attribute: Any = None
) -> Iterator[Any]:
    get = filters.make_attrgetter(context.environment, attribute, None if case_sensitive else filters.ignore_case)
    found: set[Any] = set()
    for item in items:
        key = check_key(get(item))
        if key not in found:
            found.add(key)
            yield item


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_PRECISION:
        refuse(f"a number is rounded to more than {_MAX_PRECISION} digits")
    return filters.do_round(value, precision, method)


@pass_context
def _first(context: BudgetedContext, value: Any) -> Any:
    context.budget.spend(0)
    return filters.sync_do_first(context.environment, value)


@pass_context
def _last(context: BudgetedContext, value: Any) -> Any:
    context.budget.spend(0)
    return filters.do_last(context.environment, value)


@pass_context
def _replace(context: BudgetedContext, value: Any, old: Any, new: Any, count: Any = None) -> str:
    budget = context.budget
    text, old, new = (str(budget.text(each)) for each in (value, old, new))
    places = -1 if count is None else count
    spend_replace(budget, text, old, new, places)
    return text.replace(old, new, places)


@pass_context
def _format(context: BudgetedContext, value: Any, /, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes either positional or keyword arguments")
    text = context.budget.text(value)
    spend_format(context.budget, text, kwargs or args)
    return text % (kwargs or args)


@pass_context
def _join(context: BudgetedContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    budget = context.budget
    items = budget.items(value)
    if attribute is not None:
        _check_attribute(attribute)
        items = [filters.make_attrgetter(context.environment, attribute)(item) for item in items]
    separator = str(budget.text(d))
    spend_join(budget, separator, items)
    return separator.join(map(str, items))


@pass_context
def _sum(context: BudgetedContext, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = context.budget.items(value)
    if attribute is not None:
        _check_attribute(attribute)
        items = [filters.make_attrgetter(context.environment, attribute)(item) for item in items]
    if not all(map(is_number, [start, *items])):
        refuse("sum is of numbers only")
    return check_number(sum(items, start))


@pass_context
def _reverse(context: BudgetedContext, value: Any) -> Any:
    if isinstance(value, str):
        context.budget.spend(size(value))
        return value[::-1]
    return context.budget.items(value)[::-1]


@pass_context
def _dictsort(
    context: BudgetedContext, value: Any, case_sensitive: bool = False, by: Any = "key", reverse: bool = False
) -> list[Any]:
    names = list(value) if by == "key" else value
    _spend_sorting(context.budget, names)
    context.budget.spend(2 * ITEM * len(value))
    return filters.do_dictsort(value, case_sensitive, by, reverse)


@pass_context
def _items(context: BudgetedContext, value: Any) -> list[Any]:
    if isinstance(value, Undefined):
        return []
    if not isinstance(value, dict):
        raise TypeError("Can only get item pairs from a mapping.")
    context.budget.spend(2 * ITEM * len(value))
    return list(value.items())


@pass_context
def _string(context: BudgetedContext, value: Any) -> str:
    return context.budget.text(value)


@pass_context
def _safe(context: BudgetedContext, value: Any) -> Markup:
    text = context.budget.text(value)
    context.budget.spend(size(text))
    return Markup(text)


@pass_context
def _escape(context: BudgetedContext, value: Any) -> Markup:
    text = context.budget.text(value)
    context.budget.spend(ESCAPE_GROWTH * size(text))
    return escape(text)


@pass_context
def _to_json(
    context: BudgetedContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    columns = len(indent) if isinstance(indent, str) else 0 if indent is None else check_width(indent)
    between = sum(len(each) for each in separators or ())
    if max(columns, between) > _MAX_INDENT:
        refuse(f"tojson is to write more than {_MAX_INDENT} letters between two values")
    if type(value) not in SCALARS or value.__class__ is str:
        context.budget.weigh(value, _JSON_GROWTH, 4 * columns + between + (_JSON_STEP if columns else 0))
    # Jinja's own filter escapes HTML characters, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ALLOWED_FILTERS: dict[str, Function] = {
    **{name: _of_number(filters.FILTERS[name]) for name in ("abs", "float", "int")},
    "round": _of_number(_round),
    **{name: _free(filters.FILTERS[name]) for name in ("count", "d", "default", "length")},
    "first": _first,
    "last": _last,
    "list": _of_items(lambda _, items: items, _spend_each),
    "map": _of_items(filters.sync_do_map, _spend_each),
    "select": _of_items(filters.sync_do_select, _spend_each),
    "reject": _of_items(filters.sync_do_reject, _spend_each),
    "selectattr": _of_items(filters.sync_do_selectattr, _spend_each),
    "rejectattr": _of_items(filters.sync_do_rejectattr, _spend_each),
    "sort": _of_items(
        lambda context, *args, **kwargs: filters.do_sort(context.environment, *args, **kwargs), _spend_sorting
    ),
    "unique": _of_items(_unique, _spend_each),
    "dictsort": _dictsort,
    "items": _items,
    "join": _join,
    "sum": _sum,
    "reverse": _reverse,
    "format": _format,
    "string": _string,
    "safe": _safe,
    "e": _escape,
    "escape": _escape,
    "tojson": _to_json,
    "trim": of_text(filters.do_trim, spend_search),
    "lower": of_text(filters.do_lower, spend_case),
    "upper": of_text(filters.do_upper, spend_case),
    "capitalize": of_text(filters.do_capitalize, spend_case),
    "title": of_text(filters.do_title, _spend_title),
    "indent": of_text(filters.do_indent, _spend_indent),
    "replace": _replace,
}
