# SPDX-License-Identifier: Apache-2.0
"""Which replica has computed the beginning of a prompt before: by its text, which needs no tokenizer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

_PIECE_BYTES = 256  # some 64 tokens
_MAX_POINTS = 256  # of one prompt; what follows them decides nothing
_POINT_BYTES = 16
_BEFORE_MESSAGES = ("cache_salt", "instructions", "tools")  # templates write them first


@dataclass(frozen=True, slots=True)
class Asked:
    """What routing needs to know of a body."""

    model: str | None = None
    points: tuple[bytes, ...] = ()


def read_body(body: bytes) -> Asked:
    """Read a request's body; of what is no request, nothing: the frontend says what is wrong with it."""
    try:
        fields: Any = orjson.loads(body)
        if not isinstance(fields, dict):
            return Asked()
        model = fields.get("model")
        return Asked(model if isinstance(model, str) else None, tuple(_points(_parts(fields))))
    except (ValueError, TypeError):
        return Asked()


def _parts(fields: dict[str, Any]) -> Iterator[bytes]:
    """Yield the parts of a prompt: those of a conversation's next turn begin with those of this one."""
    yield orjson.dumps([fields.get(name) for name in _BEFORE_MESSAGES])
    asked = next((fields[name] for name in ("messages", "prompt", "input") if name in fields), None)
    if isinstance(asked, list) and all(isinstance(each, dict) for each in asked):
        yield from (orjson.dumps(message, option=orjson.OPT_SORT_KEYS) for message in asked)
    elif asked is not None:
        yield orjson.dumps(asked)[:-1]  # a longer one goes on where the bracket or the quote was


def _points(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a digest of all up to the end of each part, and to each of its pieces; none for what all prompts have."""
    digest = blake2b(digest_size=_POINT_BYTES)
    count = 0
    for index, part in enumerate(parts):
        for start in range(0, len(part), _PIECE_BYTES):
            digest.update(part[start : start + _PIECE_BYTES])
            if index:
                yield digest.copy().digest()
                count += 1
                if count == _MAX_POINTS:
                    return
        digest.update(b"\0")  # no JSON holds it


class PrefixTable:
    """Which replicas have seen which beginnings; the least recently used are forgotten."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[bytes, set[str]] = OrderedDict()
        self._sizes: Counter[str] = Counter()

    def size(self, replica: str) -> int:
        """Return how many beginnings a replica has."""
        return self._sizes[replica]

    def add(self, points: Iterable[bytes], replica: str) -> None:
        """Note that a replica computes a prompt."""
        for point in points:
            owners = self._owners.setdefault(point, set())
            self._owners.move_to_end(point)
            if replica not in owners:
                owners.add(replica)
                self._sizes[replica] += 1
        while len(self._owners) > self._capacity:
            self._sizes.subtract(self._owners.popitem(last=False)[1])

    def longest(self, points: tuple[bytes, ...], replicas: Collection[str]) -> set[str]:
        """Return those of some replicas that have the most of a prompt; none if none has any."""
        for point in reversed(points):
            found = self._owners.get(point, set()).intersection(replicas)
            if found:
                return found
        return set()
