# SPDX-License-Identifier: Apache-2.0
"""Turns options into requests: all bytes are made before the first is sent.

One seed gives one load. The same rate without and with interference has equal arrivals and lengths. The made-up
prompts differ, so that the second run does not find the first one's in a prefix cache. Chats are always the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, Final

import numpy as np

from blink.bench.arrivals import draw_arrivals
from blink.bench.chats import CHAT_KINDS, measure_chat, read_chats
from blink.bench.config import BenchConfig, LoadConfig
from blink.bench.lengths import Lengths, draw_lengths, fit
from blink.bench.record import PlannedRequest, RequestClass
from blink.bench.sharegpt import Conversation, read_conversations
from blink.bench.target import Target

_FIRST_TOKEN: Final = 256  # special tokens and single bytes lie below in most vocabularies
_TEXT: Final = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father"""
_WORDS: Final = _TEXT.split()

Prompt = str | list[int]


class Workload:
    """All requests of a sweep."""

    def __init__(self, config: BenchConfig, target: Target) -> None:
        self._load = config.load
        self._extra = config.server.extra_fields
        self._target = target
        self._max_model_len = config.load.max_model_len or target.max_model_len
        arrivals = [self._arrivals(index) for index in range(len(config.load.rates))]
        self._arrival_times = arrivals
        self._conversations: list[Conversation] = []
        self._chats: list[dict[str, Any]] = []
        most = max(len(times) for times in arrivals)
        if config.load.dataset_name in CHAT_KINDS:
            self._chats = read_chats(config.load.dataset_name, most)
        if config.load.dataset_name == "sharegpt":
            rng = np.random.default_rng([config.load.seed, 1])
            path = config.load.dataset_path
            self._conversations = read_conversations(path, most, self._max_model_len, target, rng)

    @property
    def guesses_lengths(self) -> bool:
        """Whether lengths of texts were estimated, because the server does not tokenize."""
        return any(conversation.tokens is None for conversation in self._conversations)

    def plan(self, rate_index: int, condition: int) -> list[PlannedRequest]:
        """Make the requests of one rate, ascending in time; `condition` tells runs of the same rate apart."""
        times = self._arrival_times[rate_index]
        rng = np.random.default_rng([self._load.seed, rate_index, 2])
        drawn = [found.lengths for found in self._conversations] or [measure_chat(chat) for chat in self._chats]
        drawn = drawn or draw_lengths(self._load, len(times), rng)
        prompts = np.random.default_rng([self._load.seed, rate_index, condition, 3])
        planned: list[PlannedRequest] = []
        for index, at in enumerate(times):
            lengths = fit(drawn[index], self._load, self._max_model_len)
            planned.append(self._request(index, at, lengths, prompts))
        if self._load.flex_request_rate:
            planned += self._plan_flex(len(planned), max(times[-1:], default=0.0), rate_index, prompts)
            planned.sort(key=lambda request: request.at)
        return planned

    def _plan_flex(self, first: int, end: float, rate_index: int, prompts: np.random.Generator) -> list[PlannedRequest]:
        """Make the requests of the second load, until `end` or for the duration; `first` is their first index."""
        load = replace(self._load, input_len=self._load.flex_input_len, output_len=self._load.flex_output_len)
        rng = np.random.default_rng([load.seed, rate_index, 6])
        times = draw_arrivals(load.flex_request_rate, end if load.num_prompts else load.duration, 0, rng)
        planned: list[PlannedRequest] = []
        for index, (at, drawn) in enumerate(zip(times, draw_lengths(load, len(times), rng), strict=True), first):
            lengths = fit(drawn, load, self._max_model_len)
            planned.append(self._request(index, at, lengths, prompts, made_up=True, request_class="flex"))
        return planned

    def plan_warmups(self) -> list[PlannedRequest]:
        """Make the requests that are not counted, all sent at once."""
        rng = np.random.default_rng([self._load.seed, 4])
        lengths = fit(Lengths(self._load.mean_input_len, 16), self._load, self._max_model_len)
        number = range(self._load.num_warmups)
        return [self._request(index, 0.0, lengths, rng, made_up=True) for index in number]

    def _arrivals(self, index: int) -> list[float]:
        load = self._load
        rate = load.rates[index]
        duration = 0.0 if math.isinf(rate) else load.duration
        return draw_arrivals(rate, duration, load.num_prompts, np.random.default_rng([load.seed, index, 5]))

    def _request(
        self,
        index: int,
        at: float,
        lengths: Lengths,
        rng: np.random.Generator,
        *,
        made_up: bool = False,
        request_class: RequestClass = "default",
    ) -> PlannedRequest:
        is_chat = bool(self._chats) and not made_up
        fields: dict[str, Any]
        if is_chat:
            fields = dict(self._chats[index])
        elif self._conversations and not made_up:
            fields = {"prompt": _cut(self._conversations[index], lengths, self._load.prompt_format)}
        else:
            fields = {"prompt": _make_up(lengths.input_len, self._load, rng)}
        if not is_chat:  # a chat ends where the model ends it
            fields["ignore_eos"] = self._load.ignore_eos
        fields |= {
            "model": self._target.model,
            "max_tokens": lengths.output_len,
            "temperature": self._load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if request_class == "flex":
            fields["service_tier"] = self._load.flex_service_tier
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = self._target.request_head(len(body), is_chat=is_chat)
        return PlannedRequest(index, at, head + body, lengths.input_len, lengths.output_len, request_class)


def _make_up(length: int, load: LoadConfig, rng: np.random.Generator) -> Prompt:
    """Invent a prompt: random token ids, or about as many words."""
    if load.prompt_format == "text":
        return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), length))
    return rng.integers(_FIRST_TOKEN, load.vocab_size, length).tolist()


def _cut(conversation: Conversation, lengths: Lengths, prompt_format: str) -> Prompt:
    tokens = conversation.tokens
    if prompt_format == "text" or tokens is None:
        return conversation.text
    return (tokens * -(-lengths.input_len // len(tokens)))[: lengths.input_len]
