# SPDX-License-Identifier: Apache-2.0
"""Chats of one kind, from a file that ships with Blink: what speculative decoding gains depends on the kind of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from blink.bench.lengths import Lengths

_FILE: Final = Path(__file__).with_name("texts.json")
_BYTES_PER_TOKEN: Final = 4
_ANSWER_TOKENS: Final = 256  # at most; an answer ends where the model ends it

# JSON by a schema; code with one name changed, whose old text is the prediction; sentences quoted from a text.
CHAT_KINDS: Final = ("chat", "json", "edit", "quotes")


def read_chats(kind: str, number: int) -> list[dict[str, Any]]:
    """Return the fields of some requests of a kind, in their order; again when they run out."""
    chats: list[dict[str, Any]] = json.loads(_FILE.read_text())[kind]
    return [chats[index % len(chats)] for index in range(number)]


def measure_chat(chat: dict[str, Any]) -> Lengths:
    """Return about how many tokens the messages have, and how many the answer may have."""
    text = "".join(message["content"] for message in chat["messages"])
    return Lengths(len(text.encode()) // _BYTES_PER_TOKEN, _ANSWER_TOKENS)
