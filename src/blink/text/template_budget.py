# SPDX-License-Identifier: Apache-2.0
"""What one rendering of a chat template may cost: bytes made and steps done are spent before each operation.

A template comes with the model, is a program, and must not hold a frontend: no operation runs that its budget does not
cover, whatever its operands are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from itertools import chain
from typing import Any, NoReturn

from jinja2 import TemplateRuntimeError, Undefined
from jinja2.runtime import Context, LoopContext, Macro

# A step counts as much as so many bytes: both take some tenths of a microsecond.
_STEP = 16
_BYTES_PER_LOOK = 16 << 10  # at the clock and at what is left: asking for the time is a call of the system
ITEM = 64  # bytes that an element of a container, a number or a short text may take
_REFERENCE = 16  # bytes that an element takes that is there already
SMALL_TEXT = 64  # is covered by the step around it
_FREE_BYTES = 32 << 20
_SECONDS = 0.8  # of this thread alone, so that a busy machine refuses no honest template
_BYTES_PER_CHAR = 64  # of the input: each is copied some times
_SECONDS_PER_CHAR = 2e-6
_MAX_DEPTH = 128
_MAX_BITS = 64
_MAX_KEY = 1 << 16
ESCAPE_GROWTH = 6  # of a text that is escaped for HTML, as all beside Markup is
_REPR_GROWTH = 4  # of a text that is shown inside of a container: a control character becomes four
SCALARS = frozenset((str, int, float, bool, type(None)))
_CONTAINERS = (list, tuple, KeysView, ValuesView, ItemsView)
_OPAQUE = (int, float, type(None), Undefined, range, LoopContext, Macro)  # are shown in a few letters


def refuse(reason: str) -> NoReturn:
    """Refuse what a template is about to do.

    Raises:
        TemplateRuntimeError: always.
    """
    raise TemplateRuntimeError(f"it does too much: {reason}")


def size(text: str) -> int:
    """Return an upper bound of the bytes that a copy of a text takes, escaped for HTML where it is Markup."""
    length = len(text) if text.isascii() else 4 * len(text)
    return length if type(text) is str else ESCAPE_GROWTH * length


def bytes_per_char(*texts: str) -> int:
    """Return the bytes that a character of a text made of these may take."""
    wide = 1 if all(map(str.isascii, texts)) else 4
    return wide if all(type(text) is str for text in texts) else ESCAPE_GROWTH * wide


def room(*texts: str) -> int:
    """Return an upper bound of the bytes that texts take if they become one."""
    return bytes_per_char(*texts) * sum(map(len, texts))


class Budget:
    """What is left to one rendering."""

    __slots__ = ("_deadline", "_inputs", "_unchecked", "left")

    def __init__(self, *inputs: Any) -> None:
        """Give a rendering of these inputs its budget."""
        self.left = _FREE_BYTES
        self._unchecked = _FREE_BYTES - _BYTES_PER_LOOK
        self._deadline: float | None = None  # for a while nobody looks
        self._inputs = inputs

    def spend(self, num_bytes: int) -> None:
        """Take a step that makes so many bytes, of which there are never less than none.

        Raises:
            TemplateRuntimeError: that is more than is left.
        """
        self.left -= num_bytes + _STEP
        if self.left <= self._unchecked:
            self._look()

    def _look(self) -> None:
        self._unchecked = self.left - _BYTES_PER_LOOK
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + _SECONDS
        if (now > self._deadline or self.left < 0) and self._inputs:
            # How large the input is matters seldom.
            length = len(repr(self._inputs))
            self._inputs = ()
            self.left += _BYTES_PER_CHAR * length
            self._unchecked = self.left - _BYTES_PER_LOOK
            self._deadline += _SECONDS_PER_CHAR * length
        if self.left < 0:
            refuse("it makes more of its input than any template has to")
        if now > self._deadline:
            raise TemplateRuntimeError("it takes longer than it may: a loop of it may have no end")

    def weigh(self, value: Any, per_char: int = 1, per_level: int = 0, depth: int = 1) -> None:
        """Spend what it takes to walk through a value and all in it: a list that holds another twice does so twice.

        per_char: bytes for each of a text; per_level: bytes for each element and level of depth.
        """
        if depth > _MAX_DEPTH:
            refuse(f"a value is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, str):
            return self.spend(per_char * room(value))
        if isinstance(value, dict):
            items: Iterable[Any] = chain(value, value.values())
        elif isinstance(value, _CONTAINERS):
            items = value
        elif isinstance(value, _OPAQUE):
            return self.spend(ITEM)
        else:
            refuse(f"a {type(value).__name__} has no text and is equal to nothing")
        total = (ITEM + per_level * depth) * (2 * len(value) if isinstance(value, dict) else len(value))
        self.spend(total)
        total = 0
        for item in items:
            kind = type(item)
            if kind is str:
                total += sys.getsizeof(item)
            elif kind not in SCALARS:
                self.weigh(item, per_char, per_level, depth + 1)
        self.spend(per_char * total)
        return None

    def text(self, value: Any) -> str:
        """Return a value as text, paid for unless it is one."""
        if isinstance(value, str):
            return value
        if type(value) not in SCALARS:
            self.weigh(value, _REPR_GROWTH)
        return str(value)

    def operand(self, value: Any) -> Any:
        """Return a value that is going to be compared, and spend what that may take."""
        kind = type(value)
        if kind is str:
            if len(value) > SMALL_TEXT:
                self.spend(len(value) >> 2)
        elif kind not in SCALARS and not isinstance(value, Undefined):
            self.weigh(value, _REPR_GROWTH)  # an error may show it
        return value

    def container(self, value: Any) -> Any:
        """Return a value in which something is going to be looked for, and spend what that may take."""
        return value if isinstance(value, dict) else self.operand(value)

    def items(self, value: Any) -> list[Any]:
        """Return a list of what a value holds, which is paid for.

        Raises:
            TypeError: it holds nothing.
        """
        if not isinstance(value, (str, dict, range, LoopContext, Undefined, *_CONTAINERS)):
            raise TypeError(f"{type(value).__name__!r} object is not iterable")
        self.spend((ITEM if isinstance(value, (str, range)) else _REFERENCE) * len(value))
        return list(value)


def check_key(key: Any) -> Any:
    """Return what is a key of a mapping, or an index: a text, a number or nothing at all."""
    if (type(key) not in SCALARS and not isinstance(key, (str, Undefined))) or (
        isinstance(key, str) and len(key) > 1 << 16
    ):
        refuse("a key is neither a number nor a text of some letters")
    return key


def check_number(value: Any) -> Any:
    """Return a number, unless it is an integer of more than 64 bits."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        refuse(f"an integer has more than {_MAX_BITS} bits")
    return value


class BudgetedContext(Context):
    """The variables of one rendering, and its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> BudgetedContext:
        """Return a context with more variables and the same budget."""
        context = super().derived(locals)
        assert isinstance(context, BudgetedContext)
        context.budget = self.budget
        return context
