# SPDX-License-Identifier: Apache-2.0
"""What a request's body becomes, whatever API it came by, and what it is measured by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blink.api.serving.reply import Reply
from blink.api.serving.response_store import StoreLimits
from blink.beam_search_params import BeamSearchParams
from blink.errors import BlinkError, EngineUnavailableError
from blink.link.client import RegionInfo
from blink.sampling_params import SamplingParams
from blink.text.message.tool_use import ToolUse
from blink.text.prompt import PromptRules

Tokens = npt.NDArray[np.int32]
_NO_RULES = PromptRules(add_special_tokens=False)


class HeavyRequestError(BlinkError):
    """A body turns out to be more work than others should wait for: read it elsewhere."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a body is measured by."""

    max_tokenize_chars: int
    model_names: tuple[str, ...]  # empty: not known yet
    engine: RegionInfo | None  # None while there is none: then nothing is tokenized
    may_choose_calls: bool = True  # the model may decide whether it calls tools
    shows_fields: bool = False  # in the log
    names_token_ids: bool = False  # in all logprobs, whatever a request says
    always_has_usage: bool = False  # streams, whatever a request says
    shows_times: bool = False  # in answers
    store: StoreLimits | None = None  # of responses that later requests go on from; None: none are kept
    owner: bytes = b""  # the digest of the request's API key
    trusts_templates: bool = False  # requests may bring a chat template
    is_hurried: bool = False  # others wait while the body is read


@dataclass(slots=True, kw_only=True)  # one for each request: freezing would triple the time of making it
class ParsedRequest:
    """A request: what the engine is asked for, and what the answer needs. Nothing of the body is kept beside it."""

    model: str | None  # that the client asks for
    has_engine: bool = True  # else nothing was tokenized
    answer: bytes = b""  # of a request that needs no engine's work
    prompts: list[Tokens] = field(default_factory=list[Tokens])
    rules: PromptRules = _NO_RULES
    params: SamplingParams = field(default_factory=SamplingParams)
    tool_use: ToolUse | None = None
    search: BeamSearchParams | None = None  # its answers are searched for, not sampled
    reply: Reply = field(default_factory=Reply)
    stream: bool = False
    request_id: str | None = None
    kept_input: bytes | None = None  # what is stored with the answer; None: the answer is not stored
    runs_behind: bool = False  # answered at once; the client asks for the output later
    shown: dict[str, Any] = field(default_factory=dict[str, Any])  # fields for the log
    parsed_at: float = 0.0  # when its fields were checked and its texts not yet tokenized; seconds, time.perf_counter

    def check_engine(self) -> None:
        """Refuse a request that was read when nobody knew how long it may be.

        Raises:
            EngineUnavailableError: no engine was there.
        """
        if not self.has_engine:
            raise EngineUnavailableError("Not available: the engine has just started. Retry.")
