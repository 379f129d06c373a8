# SPDX-License-Identifier: Apache-2.0
"""From expressions to what the native library makes of their graphs: automata and languages."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping

from blink.grammar.errors import AmbiguousGrammarError, GrammarError, GrammarTooLargeError
from blink.grammar.expression import Block, Call, Choice, Expression, Marked, Members, Paths, Repeat, Series, Until
from blink.grammar.graph_builder import GraphBuilder
from blink.grammar.language import Language, take_built
from blink.region.layout import CONSTANTS
from blink.region.native import lib

_MAX_BUILDS = 16
_TOO_LARGE, _NEVER = -1, -2


def build_automaton(root: Expression, rules: Mapping[str, Expression]) -> bytes:
    """Return the automaton of the texts of `root`, whose calls are of `rules`.

    Calls between which one byte does not decide are written out, as long as they are not recursive.

    Raises:
        GrammarTooLargeError: it has too many states, or takes too much work.
        AmbiguousGrammarError: one byte does not always say which rule comes next, or ends.
        GrammarError: no text fits.
    """
    inline = _called_once(root, rules)
    for _ in range(_MAX_BUILDS):
        builder = GraphBuilder(rules, inline)
        builder.add_rule("", root, is_greedy=False)
        builder.finish()
        conflicts = ctypes.create_string_buffer(len(builder.table) // 4)
        out = ctypes.create_string_buffer(CONSTANTS["max_automaton_bytes"])
        size: int = lib.blink_automaton_build(builder.graph(), out, conflicts)
        if size >= 0:
            return out.raw[:size]
        if size == _TOO_LARGE:
            raise GrammarTooLargeError("it needs too many states")
        if size == _NEVER:
            raise GrammarError("no finite text fits it")
        found = {name for name, is_one in zip(builder.names(), conflicts.raw, strict=True) if is_one} - inline
        if any(isinstance(name, Marked) for name in found):
            raise AmbiguousGrammarError("arrays with uniqueItems, and others that may stand for them, begin alike")
        if not found:
            break
        inline |= found
    raise AmbiguousGrammarError("parts that may follow each other, or stand for each other, begin alike")


def build_language(expression: Expression) -> Language:
    """Return the language of an expression without calls.

    Raises:
        GrammarTooLargeError: it has too many states, or takes too much work.
    """
    builder = GraphBuilder({}, set(), of_bytes=False)
    builder.add_rule("", expression, is_greedy=False)
    builder.finish()
    return take_built(lambda: lib.blink_language_build(builder.graph()))


def _called_once(root: Expression, rules: Mapping[str, Expression]) -> set[object]:
    """Return the rules that stand in one place: written out there they are no larger, and nothing is undecided."""
    calls: Counter[str] = Counter()
    seen: Counter[int] = Counter()
    left = [(expression, False) for expression in (root, *rules.values())]
    while left:
        expression, is_copied = left.pop()
        seen[id(expression)] += 1
        if seen[id(expression)] > 2:
            continue
        is_copied = is_copied or seen[id(expression)] > 1
        if isinstance(expression, Call):
            calls[expression.rule] += 1 + is_copied
        else:
            left += [(part, is_copied or may_be_copied) for part, may_be_copied in _parts_of(expression)]
    return {rule for rule, count in calls.items() if count == 1}


def _parts_of(expression: Expression) -> list[tuple[Expression, bool]]:
    """Return what an expression is made of, and whether it may be emitted several times."""
    if isinstance(expression, Series):
        return [(part, False) for part in expression.parts]
    if isinstance(expression, Choice):
        return [(option, False) for option in expression.options]
    if isinstance(expression, Repeat):
        return [(expression.part, max(expression.least, expression.most or 0) > 1)]
    if isinstance(expression, Until):
        return [(expression.rest, False)]
    if isinstance(expression, Marked):
        return [(expression.part, False)]
    if isinstance(expression, Block):
        return [(expression.part, True)]
    if isinstance(expression, Paths):
        items = (item for _, item, _ in expression.edges)
        return [(part, True) for part in (expression.separator, expression.behind, *items)]
    if isinstance(expression, Members):
        others = [each for each in (expression.separator, expression.behind, expression.others) if each is not None]
        is_counted = expression.least > 1 or expression.most is not None
        return [*((item, is_counted) for item, _ in expression.items), *((other, True) for other in others)]
    return []
