# SPDX-License-Identifier: Apache-2.0
"""The chunks of a stream, put together from prebuilt bytes: only text, and what was asked for, is encoded per chunk."""

from __future__ import annotations

from typing import Any

import orjson

from blink.api.http.errors import blink_error_json
from blink.api.openai.choices import ChoicesReply, times_of, usage_of
from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.text.generation import Delta, Generation

DONE = b"data: [DONE]\n\n"


class ChunkEncoder:
    """Encode the chunks of one stream."""

    def __init__(self, reply: ChoicesReply, session: Session) -> None:
        self._reply = reply
        self._session = session
        kind = "chat.completion.chunk" if reply.is_chat else "text_completion"
        common = {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}
        if reply.fingerprint:
            common["system_fingerprint"] = reply.fingerprint
        self._common = b"data: " + orjson.dumps(common)[:-1]
        text_key = b',"delta":{"content":' if reply.is_chat else b',"text":'
        self._heads = [
            b'%b,"choices":[{"index":%d%b' % (self._common, generation.index, text_key)
            for generation in session.generations
        ]
        self._text_end = b"}" if reply.is_chat else b""
        self._plain_tail = self._text_end + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._logprob_format = reply.logprobs
        self._is_plain = not (reply.has_logprobs or reply.return_token_ids or reply.continuous_usage)
        self._offsets = [0] * len(session.generations)
        self._started = [False] * len(session.generations)

    def encode(self, generation: Generation) -> bytes:
        """Return what a sequence has gained as one chunk; the first time with what must stand before it."""
        index, delta = generation.index, generation.take()
        if not self._started[index]:
            self._started[index] = True
            return self._opening(generation) + self._encode_delta(generation, delta)
        return self._encode_delta(generation, delta)

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last bytes of the stream."""
        if error is not None:
            return b"data: %b\n\n%b" % (blink_error_json(error), DONE)
        if not self._reply.include_usage:
            return DONE
        usage = usage_of(self._session.prompts, self._session.generations, self._reply.num_choices)
        last = {"choices": [], "usage": usage, **times_of(self._reply, self._session)}
        return b"%b,%b\n\n%b" % (self._common, orjson.dumps(last)[1:], DONE)

    def _encode_delta(self, generation: Generation, delta: Delta) -> bytes:
        text = orjson.dumps(delta.text)
        if self._is_plain and generation.finish_reason is None:
            return b"%b%b%b" % (self._heads[generation.index], text, self._plain_tail)
        fields: dict[str, Any] = {
            "logprobs": self._logprobs(generation, delta),
            "finish_reason": generation.finish_reason,
        }
        if generation.finish_reason is not None:
            fields["stop_reason"] = generation.stop_reason
        if self._reply.return_token_ids:
            fields["token_ids"] = delta.tokens
        rest = orjson.dumps(fields)[1:]
        return b"%b%b%b,%b]%b}\n\n" % (
            self._heads[generation.index],
            text,
            self._text_end,
            rest,
            self._running_usage(generation),
        )

    def _opening(self, generation: Generation) -> bytes:
        reply = self._reply
        prompt_ids: dict[str, Any] = {}
        if reply.return_token_ids:
            prompt_ids["prompt_token_ids"] = reply.prompt_of(self._session, generation).tokens.tolist()
        choice: dict[str, Any] = {"index": generation.index}
        if reply.is_chat:
            choice |= {"delta": {"role": reply.role, "content": ""}, "logprobs": None, "finish_reason": None}
            body: dict[str, Any] = {"choices": [choice], **prompt_ids}
        elif reply.echoes or prompt_ids:
            text = reply.echo_of(generation)
            choice |= {"text": text, "logprobs": None, "finish_reason": None, **prompt_ids}
            body = {"choices": [choice]}
        else:
            return b""
        if reply.continuous_usage:
            body["usage"] = self._usage_before(generation)
        return b"%b,%b\n\n%b" % (self._common, orjson.dumps(body)[1:], self._echo(generation))

    def _echo(self, generation: Generation) -> bytes:
        """Return the chunk of a chat's echo; a completion's is in its first one."""
        echo = self._reply.echo_of(generation) if self._reply.is_chat else ""
        if not echo:
            return b""
        chunk = self._heads[generation.index] + orjson.dumps(echo) + self._plain_tail
        if not self._reply.continuous_usage:
            return chunk
        usage = orjson.dumps(self._usage_before(generation))
        return b'%b,"usage":%b}\n\n' % (chunk.removesuffix(b"}\n\n"), usage)

    def _logprobs(self, generation: Generation, delta: Delta) -> dict[str, Any] | None:
        form = self._logprob_format
        if form is None:
            return None
        if self._reply.is_chat:
            return form.chat(delta.logprobs)
        offset = self._offsets[generation.index]
        self._offsets[generation.index] += form.length(delta.logprobs)
        return form.completion(delta.logprobs, offset)

    def _running_usage(self, generation: Generation) -> bytes:
        return b',"usage":' + orjson.dumps(self._usage(generation)) if self._reply.continuous_usage else b""

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return usage_of([self._reply.prompt_of(self._session, generation)], [generation], 1)

    def _usage_before(self, generation: Generation) -> dict[str, Any]:
        """Return the usage of chunks that stand before the first token."""
        usage = self._usage(generation)
        none = {"completion_tokens": 0, "completion_tokens_details": {"reasoning_tokens": 0}}
        return usage | none | {"total_tokens": usage["prompt_tokens"]}
