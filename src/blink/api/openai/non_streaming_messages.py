# SPDX-License-Identifier: Apache-2.0
"""The body of a chat that is not streamed and whose text is read as a message: as it grows, not at its end."""

from __future__ import annotations

from typing import Any

from blink.api.openai.choices import ChoicesReply, NonStreamingChoices, chat_choice
from blink.api.openai.functions import with_function_call
from blink.api.openai.message_body import finish_reason, full_message
from blink.api.serving.session import Session
from blink.text.generation import Delta, Generation, TokenLogprob
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import Part, Reasoning, merge


def open_non_streaming(reply: ChoicesReply, session: Session) -> NonStreamingChoices:
    """Return what gathers a completion or chat that is not streamed."""
    return (
        NonStreamingChoices(reply, session)
        if reply.message is None
        else NonStreamingMessages(reply, session, reply.message)
    )


class _Gathered:
    """What one reply has gained."""

    def __init__(self, form: MessageForm) -> None:
        self.parser = MessageParser(form)
        self.parts: list[Part] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class NonStreamingMessages(NonStreamingChoices):
    """Gather the messages of all choices."""

    def __init__(self, reply: ChoicesReply, session: Session, form: MessageForm) -> None:
        super().__init__(reply, session)
        self._form = form
        self._gathered = [_Gathered(form) for _ in session.generations]

    def take(self, generation: Generation) -> None:
        """Read what a sequence has gained."""
        gathered, delta = self._gathered[generation.index], generation.take()
        gathered.parts += gathered.parser.push(delta.text)
        if gathered.parser.is_reasoning:  # to a batch of tokens: usually one
            generation.reasoning_tokens += len(delta.tokens)
        gathered.tokens += delta.tokens
        gathered.logprobs += delta.logprobs

    def _choice(self, generation: Generation) -> dict[str, Any]:
        self.take(generation)
        gathered = self._gathered[generation.index]
        parts = merge([*gathered.parts, *gathered.parser.finish()])
        if gathered.parser.repeats_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        delta = Delta("", gathered.tokens, gathered.logprobs)
        message, is_older = full_message(self._reply.role, parts, self._form), self._reply.calls_functions
        message = with_function_call(message) if is_older else message
        reason = finish_reason(generation, gathered.parser, self._form, calls_functions=is_older)
        return chat_choice(self._reply, generation, delta, message) | {"finish_reason": reason}
