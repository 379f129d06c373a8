# SPDX-License-Identifier: Apache-2.0
"""The answers of Ollama's API: lines of JSON, or one object that has all of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from blink.api.ollama.errors import write_error
from blink.api.ollama.model_card import rfc3339
from blink.api.openai.logprobs import LogprobFormat
from blink.api.serving.growing_message import GrowingMessage, read_arguments
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.text.generation import Generation
from blink.text.message.parser import MessageForm
from blink.text.message.parts import CallArguments, CallOpened, Content, Part

LINES = "application/x-ndjson"
_ID_BYTES = 4

AnswerForm = Literal["message", "response"]  # of chats, and of /api/generate
Piece = dict[str, Any]  # what one line adds: content, thinking, tool_calls, logprobs


@dataclass(slots=True, kw_only=True)
class OllamaReply(Reply):
    """The form of one answer."""

    form: AnswerForm
    has_logprobs: bool = False


class OllamaAnswer:
    """The one answer of a session."""

    def __init__(self, reply: OllamaReply, session: Session) -> None:
        self._reply = reply
        self._session = session
        self._message = GrowingMessage(reply.message or MessageForm())
        self._call: tuple[str, list[str]] | None = None  # the name and the arguments of a call that grows
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._first: float | None = None  # when the first token came; seconds, time.perf_counter
        tokenizer = reply.tokenizer if reply.has_logprobs else None
        self._logprobs = LogprobFormat(tokenizer, as_token_ids=False) if tokenizer is not None else None

    def take(self, generation: Generation) -> list[Piece]:
        """Take what the output has gained; return it in pieces."""
        self._first = self._first or time.perf_counter()
        has_ended = generation.finish_reason is not None
        parts = self._message.take(generation)
        pieces = [piece for part in parts for piece in self._read(part)]
        if has_ended:
            pieces += self._end_call()
        if self._logprobs is not None and (parts or has_ended) and self._message.logprobs:
            pieces = pieces or [{}]
            pieces[-1]["logprobs"] = self._logprobs.chat(self._message.logprobs)["content"]
        self._pieces += pieces
        return pieces

    def encode(self) -> bytes:
        """Return the object when the output has ended."""
        whole: Piece = {}
        for piece in self._pieces:
            for name, value in piece.items():
                whole[name] = whole[name] + value if name in whole else value
        return orjson.dumps(self.line(whole) | self.end)

    def line(self, piece: Piece) -> dict[str, Any]:
        """Return the line of a piece."""
        told = {"model": self._reply.model, "created_at": rfc3339()}
        logprobs = {name: value for name, value in piece.items() if name == "logprobs"}
        rest = {name: value for name, value in piece.items() if name not in ("logprobs", "content")}
        if self._reply.form == "message":
            text: dict[str, Any] = {"message": {"role": "assistant", "content": piece.get("content", ""), **rest}}
        else:
            text = {"response": piece.get("content", ""), **rest}
        return {**told, **text, "done": False, **logprobs}

    @property
    def end(self) -> dict[str, Any]:
        """Return how the output has ended, and what it took; durations in nanoseconds."""
        generation, now = self._session.generations[0], time.perf_counter()
        first = self._first or now
        return {
            "done": True,
            "done_reason": generation.finish_reason,
            "total_duration": round((now - self._session.arrived) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._session.prompts[0].num_tokens,
            "prompt_eval_duration": round((first - self._session.arrived) * 1e9),
            "eval_count": generation.num_tokens,
            "eval_duration": round((now - first) * 1e9),
        }

    def _read(self, part: Part) -> list[Piece]:
        if isinstance(part, CallArguments):
            if self._call is not None:
                self._call[1].append(part.text)
            return []
        pieces = self._end_call()
        if isinstance(part, CallOpened):
            self._call = (part.name, [])
            return pieces
        name = "content" if isinstance(part, Content) else "thinking"
        return [*pieces, {name: part.text}]

    def _end_call(self) -> list[Piece]:
        """Return the call that has grown: Ollama's calls come whole, with arguments that are an object."""
        if self._call is None:
            return []
        name, arguments = self._call
        self._call = None
        function = {"index": self._num_calls, "name": name, "arguments": read_arguments("".join(arguments))}
        self._num_calls += 1
        return [{"tool_calls": [{"id": f"call_{secrets.token_hex(_ID_BYTES)}", "function": function}]}]


class OllamaLines:
    """Encode the lines of one streamed answer."""

    def __init__(self, reply: OllamaReply, session: Session) -> None:
        self._answer = OllamaAnswer(reply, session)

    def encode(self, generation: Generation) -> bytes:
        """Return the lines of what the output has gained."""
        return _encode([self._answer.line(piece) for piece in self._answer.take(generation)])

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last line."""
        if error is not None:
            return write_error(error.message, error.type, int(error.status), error.param) + b"\n"
        return _encode([self._answer.line({}) | self._answer.end])


def _encode(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join([orjson.dumps(line) + b"\n" for line in lines])
