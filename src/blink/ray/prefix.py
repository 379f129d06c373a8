# SPDX-License-Identifier: Apache-2.0
"""The beginnings of a request's prompt, for routing: by its text, which needs no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
