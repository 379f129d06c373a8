# SPDX-License-Identifier: Apache-2.0
"""The answers of /completion and /infill: events of a stream, or one object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from blink.api.llama_cpp.errors import write_error
from blink.api.openai.ggml_options import FIELD_ORIGINS
from blink.api.openai.logprobs import LogprobFormat
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.sampling_params import SamplingParams
from blink.sampling_ranges import SAMPLING_RANGES
from blink.text.generation import Delta, Generation, TokenLogprob


@dataclass(slots=True, kw_only=True)
class LlamaCppReply(Reply):
    """The form of one answer. fields: what of it is told; nothing: all."""

    prompt: str
    params: SamplingParams = field(default_factory=SamplingParams)
    has_tokens: bool = False
    has_timings: bool = False
    fields: tuple[str, ...] = ()


class LlamaCppAnswer:
    """The one answer of a session."""

    def __init__(self, reply: LlamaCppReply, session: Session) -> None:
        self._reply = reply
        self._session = session
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._entries: list[TokenLogprob] = []
        self._first: float | None = None  # when the first token came; seconds, time.perf_counter

    def take(self, generation: Generation) -> dict[str, Any]:
        """Take what the output has gained; return the event that tells of it."""
        self._first = self._first or time.perf_counter()
        delta = generation.take()
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self._entries += delta.logprobs
        event: dict[str, Any] = {
            "index": 0,
            "content": delta.text,
            "tokens": delta.tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": generation.num_tokens,
            "tokens_evaluated": self._session.prompts[0].num_tokens,
        }
        if self._reply.has_timings:
            event["timings"] = self._timings
        return event | self._probabilities(delta)

    def encode(self) -> bytes:
        """Return the object when the output has ended."""
        delta = Delta("".join(self._texts), self._tokens if self._reply.has_tokens else [], self._entries)
        return orjson.dumps(_choose(self.final(delta), self._reply.fields))

    def final(self, delta: Delta) -> dict[str, Any]:
        """Return the object, or the last event, with what it adds to those before it."""
        generation, prompt = self._session.generations[0], self._session.prompts[0]
        return {
            "index": 0,
            "content": delta.text,
            "tokens": delta.tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._reply.model,
            "tokens_predicted": generation.num_tokens,
            "tokens_evaluated": prompt.num_tokens,
            "generation_settings": self._settings,
            "prompt": self._reply.prompt,
            "has_new_line": "\n" in "".join(self._texts),
            "truncated": False,
            **_stop_of(generation),
            "tokens_cached": generation.cached_tokens,
            "timings": self._timings,
        } | self._probabilities(delta)

    @property
    def _settings(self) -> dict[str, Any]:
        params = self._reply.params
        sampling = {FIELD_ORIGINS[name]: getattr(params, name) for name in SAMPLING_RANGES}
        told = {"n_predict": -1 if params.max_tokens is None else params.max_tokens, "stop": list(params.stops)}
        seed = -1 if params.seed is None else params.seed
        return {**sampling, **told, "seed": seed, "ignore_eos": params.ignore_eos, "n_probs": params.logprobs or 0}

    @property
    def _timings(self) -> dict[str, Any]:
        """Return counts, milliseconds and speeds of the prompt and of the output."""
        generation, now = self._session.generations[0], time.perf_counter()
        first, num_cached = self._first or now, generation.cached_tokens
        timings: dict[str, Any] = {"cache_n": num_cached}
        for name, tokens, seconds in (
            ("prompt", self._session.prompts[0].num_tokens - num_cached, first - self._session.arrived),
            ("predicted", generation.num_tokens, now - first),
        ):
            timings |= {f"{name}_n": tokens, f"{name}_ms": seconds * 1e3}
            timings[f"{name}_per_token_ms"] = seconds * 1e3 / max(tokens, 1)
            timings[f"{name}_per_second"] = tokens / seconds if seconds > 0 else 0.0
        return timings

    def _probabilities(self, delta: Delta) -> dict[str, Any]:
        tokenizer = self._reply.tokenizer
        if tokenizer is None or self._reply.params.logprobs is None or not delta.logprobs:
            return {}
        entries = LogprobFormat(tokenizer, as_token_ids=False).chat(delta.logprobs)["content"]
        for entry, logprob in zip(entries, delta.logprobs, strict=True):
            entry["id"] = logprob.token
            for rival, (token, _) in zip(entry["top_logprobs"], logprob.top, strict=True):
                rival["id"] = token
        return {"completion_probabilities": entries}


class LlamaCppEvents:
    """Encode the events of one streamed answer."""

    def __init__(self, reply: LlamaCppReply, session: Session) -> None:
        self._answer = LlamaCppAnswer(reply, session)
        self._fields = reply.fields

    def encode(self, generation: Generation) -> bytes:
        """Return the event of what the output has gained."""
        return _encode(self._answer.take(generation))

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last event."""
        if error is not None:
            return b"data: %b\n\n" % write_error(error.message, error.type, int(error.status), error.param)
        return _encode(_choose(self._answer.final(Delta("", [], [])), self._fields))


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(event)


def _stop_of(generation: Generation) -> dict[str, str]:
    word = generation.stop_reason if isinstance(generation.stop_reason, str) else ""
    if generation.finish_reason != "stop":
        return {"stop_type": "limit" if generation.finish_reason == "length" else "none", "stopping_word": ""}
    return {"stop_type": "word" if word else "eos", "stopping_word": word}


def _choose(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the members that are named, those of objects by paths such as timings/predicted_ms; or all."""
    if not fields:
        return answer
    chosen: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        *_, last = names = path.split("/")
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[last] = value
    return chosen
