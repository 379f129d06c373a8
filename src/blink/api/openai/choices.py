# SPDX-License-Identifier: Apache-2.0
"""What the responses of completions and chats contain, and their body where it is not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from blink.api.openai.logprobs import LogprobFormat
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.text.generation import Delta, Generation, TokenLogprob
from blink.text.prompt import Prompt

# What OpenAI's messages have and these never do: some clients look for the keys.
NO_PARTS = dict[str, None].fromkeys(("refusal", "annotations", "audio", "function_call"))


@dataclass(slots=True, kw_only=True)
class ChoicesReply(Reply):
    """The form of the response to a completion or chat."""

    is_chat: bool
    role: str = "assistant"
    num_choices: int = 1  # per prompt
    has_logprobs: bool = False
    has_named_logprobs: bool = False  # of tokens that the request names, instead of the best ones
    has_prompt_logprobs: bool = False
    calls_functions: bool = False  # the request has functions instead of tools
    names_token_ids: bool = False  # in logprobs: tokens by their ids, not their texts
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    has_times: bool = False  # of its first sequence
    echoes: Sequence[str] = ()  # the text of each prompt, to stand before the output

    @property
    def logprobs(self) -> LogprobFormat | None:
        """Return how the logprobs of the output are written, None if they were not asked for."""
        return self._logprob_format if self.has_logprobs else None

    @property
    def _logprob_format(self) -> LogprobFormat:
        assert self.tokenizer is not None
        return LogprobFormat(self.tokenizer, as_token_ids=self.names_token_ids, always_sampled=self.has_named_logprobs)

    def write_prompt_logprobs(self, scores: Sequence[TokenLogprob]) -> list[Any] | None:
        """Return the logprobs of a prompt, None if they were not asked for."""
        return self._logprob_format.prompt(scores) if self.has_prompt_logprobs else None

    def prompt_of(self, session: Session, generation: Generation) -> Prompt:
        """Return the prompt of a choice."""
        return session.prompts[generation.index // self.num_choices]

    def scores_of(self, session: Session, generation: Generation) -> list[TokenLogprob]:
        """Return the logprobs of a choice's prompt, which came with the prompt's first choice."""
        return session.generations[generation.index - generation.index % self.num_choices].prompt_logprobs

    def echo_of(self, generation: Generation) -> str:
        """Return the text that stands before a choice's output."""
        return self.echoes[generation.index // self.num_choices] if self.echoes else ""


def usage_of(prompts: Sequence[Prompt], generations: Sequence[Generation], num_choices: int) -> dict[str, Any]:
    """Count the tokens of choices; a prompt counts once, with the cache hits of its first choice."""
    prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
    completion_tokens = sum(generation.num_tokens for generation in generations)
    cached_tokens = sum(generation.cached_tokens for generation in generations[::num_choices])
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.reasoning_tokens for each in generations),
            **_predicted_tokens(generations),
        },
    }


def _predicted_tokens(generations: Sequence[Generation]) -> dict[str, int]:
    """Count the tokens of a request's prediction that were tried; nothing where none was."""
    accepted, rejected = (sum(each.predicted[place] for each in generations) for place in (0, 1))
    if not accepted + rejected:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def times_of(reply: ChoicesReply, session: Session) -> dict[str, Any]:
    """Return the field of the times that the first sequence took, nothing if they were not asked for."""
    generation = session.generations[0]
    times = generation.times
    if not reply.has_times or times is None:
        return {}
    first, admitted = times.first or times.ended, times.admitted or times.arrived
    seconds = {"time_to_first_token": first - times.arrived, "queue_time": admitted - times.arrived}
    seconds["generation_time"] = times.ended - first
    if generation.num_tokens > 1:
        seconds["mean_itl"] = seconds["generation_time"] / (generation.num_tokens - 1)
    told = {f"{name}_ms": 1e3 * duration for name, duration in seconds.items()}
    return {"metrics": {**told, "tokens_per_second": generation.num_tokens / max(times.ended - admitted, 1e-9)}}


class NonStreamingChoices:
    """The body of a completion or chat that is not streamed."""

    def __init__(self, reply: ChoicesReply, session: Session) -> None:
        self._reply = reply
        self._session = session

    def take(self, generation: Generation) -> None:
        """Leave the output with the sequences: it is taken at the end."""

    def encode(self) -> bytes:
        """Return the body when all sequences have ended."""
        reply, session = self._reply, self._session
        body: dict[str, Any] = {
            "id": reply.id,
            "object": "chat.completion" if reply.is_chat else "text_completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [self._choice(generation) for generation in session.generations],
            "service_tier": None,
            "system_fingerprint": reply.fingerprint or None,
            "usage": usage_of(session.prompts, session.generations, reply.num_choices),
        }
        if reply.is_chat:
            body["prompt_logprobs"] = reply.write_prompt_logprobs(session.generations[0].prompt_logprobs)
            body["prompt_token_ids"] = session.prompts[0].tokens.tolist() if reply.return_token_ids else None
        return orjson.dumps(body | times_of(reply, session))

    def _choice(self, generation: Generation) -> dict[str, Any]:
        delta = generation.take()
        if not self._reply.is_chat:
            return _completion_choice(self._reply, self._session, generation, delta)
        message = {"role": self._reply.role, "content": delta.text, **NO_PARTS, "tool_calls": []}
        return chat_choice(self._reply, generation, delta, message)


def _completion_choice(reply: ChoicesReply, session: Session, generation: Generation, delta: Delta) -> dict[str, Any]:
    return {
        "index": generation.index,
        "text": reply.echo_of(generation) + delta.text,
        "logprobs": _completion_logprobs(reply, session, generation, delta) if reply.logprobs else None,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "prompt_logprobs": reply.write_prompt_logprobs(reply.scores_of(session, generation)),
        "token_ids": delta.tokens if reply.return_token_ids else None,
        "prompt_token_ids": reply.prompt_of(session, generation).tokens.tolist() if reply.return_token_ids else None,
    }


def _completion_logprobs(reply: ChoicesReply, session: Session, generation: Generation, delta: Delta) -> dict[str, Any]:
    assert reply.logprobs is not None
    if not reply.echoes:
        return reply.logprobs.completion(delta.logprobs, 0)
    entries = [*reply.scores_of(session, generation), *delta.logprobs]
    return reply.logprobs.echoed(int(reply.prompt_of(session, generation).tokens[0]), entries)


def chat_choice(reply: ChoicesReply, generation: Generation, delta: Delta, message: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a chat; `delta` is all that its sequence has gained."""
    if echo := reply.echo_of(generation):
        message = message | {"content": echo + (message["content"] or "")}
    return {
        "index": generation.index,
        "message": message,
        "logprobs": reply.logprobs.chat(delta.logprobs) if reply.logprobs else None,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "token_ids": delta.tokens if reply.return_token_ids else None,
    }
