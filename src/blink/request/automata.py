# SPDX-License-Identifier: Apache-2.0
"""Automata that were compiled already, and what was refused; bounded."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuredOutputsParams

_CACHE_BYTES = 32 << 20
_REFUSAL_BYTES = 1 << 10  # that a refusal counts as: what cannot be compiled is asked for again too


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, by a name that equal ones share."""

    params: StructuredOutputsParams
    key: bytes
    num_bytes: int  # as JSON


def name_ask(params: StructuredOutputsParams) -> Ask:
    """Give what a request asks for its name.

    Raises:
        BadRequestError: it is no JSON.
    """
    try:
        text = json.dumps(params, allow_nan=False, default=_list_fields).encode()
    except (TypeError, ValueError, RecursionError):
        raise BadRequestError(
            "structured_outputs holds what is no JSON, or is nested too deeply.", "structured_outputs"
        ) from None
    return Ask(params, blake2b(text, digest_size=32).digest(), len(text))


class AutomatonCache:
    """Compiled automata by what they were asked for, the least recently used dropped. Safe for use by threads."""

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Automaton | BadRequestError] = OrderedDict()

    def find(self, key: bytes) -> Automaton | None:
        """Return the automaton that was kept, if it is there.

        Raises:
            BadRequestError: a refusal was kept.
        """
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            found = self._known.get(key)
        if isinstance(found, BadRequestError):
            raise BadRequestError(found.message, found.param)
        return found

    def keep(self, key: bytes, result: Automaton | BadRequestError) -> None:
        """Keep what compiling came to."""
        with self._lock:
            if key not in self._known:
                self._known[key] = result
                self._bytes += _size_of(result)
            while self._bytes > self._max_bytes:
                self._bytes -= _size_of(self._known.popitem(last=False)[1])

    def compile(self, params: StructuredOutputsParams) -> Automaton:
        """Return the automaton of what a request asks for; compile it in this thread if it is not there.

        Raises:
            BadRequestError: it is malformed, or nothing that can be kept; the message says why.
        """
        key = name_ask(params).key
        found = self.find(key)
        if found is not None:
            return found
        try:
            automaton = compile_structured(params)
        except BadRequestError as refusal:
            self.keep(key, refusal)
            raise
        self.keep(key, automaton)
        return automaton


def _size_of(result: Automaton | BadRequestError) -> int:
    return _REFUSAL_BYTES if isinstance(result, BadRequestError) else len(result.data)


def _list_fields(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError
    return {field.name: getattr(value, field.name) for field in fields(value)}
