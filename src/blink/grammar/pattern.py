# SPDX-License-Identifier: Apache-2.0
"""From expressions without calls to the languages that they describe."""

from __future__ import annotations

from functools import lru_cache

from blink.grammar.budget import spend
from blink.grammar.expression import Both, Choice, Expression, Regular, Repeat, Series
from blink.grammar.graph import build_language
from blink.grammar.language import Language
from blink.grammar.regex import parse_regex


def language_of(expression: Expression) -> Language:
    """Return the language of an expression.

    Raises:
        GrammarTooLargeError: it needs too many states.
    """
    return build_language(without_both(expression))


def without_both(expression: Expression) -> Expression:
    """Return an expression in which languages stand for what holds together."""
    if isinstance(expression, Both):
        one, other = language_of(expression.one), language_of(expression.other)
        return Regular(one - other if expression.excludes else one & other)
    if isinstance(expression, Series):
        return Series(tuple(without_both(part) for part in expression.parts))
    if isinstance(expression, Choice):
        return Choice(tuple(without_both(option) for option in expression.options))
    if isinstance(expression, Repeat):
        return Repeat(without_both(expression.part), expression.least, expression.most)
    return expression


@lru_cache(maxsize=256)
def pattern_language(pattern: str, *, searches: bool = True, is_outer: bool = False) -> Language:
    """Return the texts that a pattern matches: those with a match inside or, unless it searches, whole ones.

    is_outer: the texts that it matches in any dialect, not those that it matches in all.

    Raises:
        GrammarError: it is malformed, too large, or has something beyond regular expressions.
    """
    spend(len(pattern) // 2)
    return language_of(parse_regex(pattern, searches=searches, is_outer=is_outer))
