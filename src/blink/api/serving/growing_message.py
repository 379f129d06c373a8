# SPDX-License-Identifier: Apache-2.0
"""The message that a request's one output is read as, while it grows."""

from __future__ import annotations

from typing import Any

import orjson

from blink.text.generation import Generation, TokenLogprob
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import Part


class GrowingMessage:
    """Read an output, and count what of it is reasoning."""

    def __init__(self, form: MessageForm, *, keeps_tokens: bool = False) -> None:
        self._parser = MessageParser(form)
        self._keeps_tokens = keeps_tokens
        self.tokens: list[int] = []  # all of the output's, if they are kept
        self._has_parts = False
        self.reasoning_tokens = 0
        self.logprobs: list[TokenLogprob] = []  # of the tokens that the parts which came last are made of

    @property
    def num_calls(self) -> int:
        """Return how many calls have been opened."""
        return self._parser.num_calls

    def take(self, generation: Generation) -> list[Part]:
        """Take what the output has gained; return what the message has."""
        delta = generation.take()
        if self._has_parts:
            self.logprobs = []
        self.logprobs += delta.logprobs
        if self._keeps_tokens:
            self.tokens += delta.tokens
        parts = self._parser.push(delta.text)
        if self._parser.is_reasoning:  # to a batch of tokens: usually one
            self.reasoning_tokens += len(delta.tokens)
        if generation.finish_reason is not None:
            parts += self._parser.finish()
        self._has_parts = bool(parts)
        return parts


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut, or that the model wrote wrongly, none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
