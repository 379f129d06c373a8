# SPDX-License-Identifier: Apache-2.0
"""The chunks of a chat whose text is read as a message: reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

import orjson

from blink.api.openai.choices import ChoicesReply
from blink.api.openai.chunks import ChunkEncoder
from blink.api.openai.functions import with_function_call
from blink.api.openai.message_body import MessageDeltas, finish_reason
from blink.api.serving.session import Session
from blink.text.generation import Delta, Generation, TokenLogprob
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import Part


def open_stream(reply: ChoicesReply, session: Session) -> ChunkEncoder:
    """Return what writes the chunks of a completion or chat."""
    return ChunkEncoder(reply, session) if reply.message is None else MessageChunkEncoder(reply, session, reply.message)


class _Choice:
    """One growing message, and what of its tokens no chunk has told yet."""

    def __init__(self, form: MessageForm) -> None:
        self.parser = MessageParser(form)
        self.deltas = MessageDeltas(form)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class MessageChunkEncoder(ChunkEncoder):
    """Encode the chunks of one stream of messages."""

    def __init__(self, reply: ChoicesReply, session: Session, form: MessageForm) -> None:
        super().__init__(reply, session)
        self._form = form
        self._choices = [_Choice(form) for _ in session.generations]

    def _encode_delta(self, generation: Generation, delta: Delta) -> bytes:
        choice, has_ended = self._choices[generation.index], generation.finish_reason is not None
        choice.tokens += delta.tokens
        choice.logprobs += delta.logprobs
        parts = choice.parser.push(delta.text)
        if choice.parser.is_reasoning:  # to a batch of tokens: usually one
            generation.reasoning_tokens += len(delta.tokens)
        if has_ended:
            parts += choice.parser.finish()
        chunks = [self._encode_chunk(generation, choice, self._encode_part(choice, part)) for part in parts]
        if has_ended:
            end = {
                "finish_reason": self._finish_reason(generation, choice),
                "stop_reason": generation.stop_reason,
            }
            chunks.append(self._encode_chunk(generation, choice, {}, end))
        return b"".join(chunks)

    def _encode_part(self, choice: _Choice, part: Part) -> dict[str, Any]:
        delta = choice.deltas.encode(part)
        return with_function_call(delta) if self._reply.calls_functions else delta

    def _finish_reason(self, generation: Generation, choice: _Choice) -> str | None:
        return finish_reason(generation, choice.parser, self._form, calls_functions=self._reply.calls_functions)

    def _encode_chunk(
        self, generation: Generation, choice: _Choice, delta: dict[str, Any], end: dict[str, Any] | None = None
    ) -> bytes:
        told = Delta("", choice.tokens, choice.logprobs)
        choice.tokens, choice.logprobs = [], []
        fields: dict[str, Any] = {"index": generation.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if told.logprobs:
            fields["logprobs"] = self._logprobs(generation, told)
        if self._reply.return_token_ids:
            fields["token_ids"] = told.tokens
        return b'%b,"choices":[%b]%b}\n\n' % (
            self._common,
            orjson.dumps(fields | (end or {})),
            self._running_usage(generation),
        )
