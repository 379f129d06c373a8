# SPDX-License-Identifier: Apache-2.0
"""What a request's body becomes, and what it is measured by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blink.errors import EngineUnavailableError
from blink.link.client import RegionInfo

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a body is measured by."""

    max_tokenize_chars: int
    model_name: str  # empty: not known yet
    engine: RegionInfo | None  # None while there is none: then nothing is tokenized


@dataclass(frozen=True, slots=True)
class Read:
    """A request, and what became of its long fields."""

    kind: str  # of its endpoint, in blink.api.endpoints
    body: Any
    prompts: list[Tokens] = field(default_factory=list[Tokens])
    echoes: list[str] = field(default_factory=list[str])
    role: str = "assistant"  # of the conversation's last message
    is_reasoning_open: bool | None = None  # as the prompt leaves it, if it says
    is_answer: bool = False  # the reply does not reason unless it writes the opening tag
    echo: bytes = b""  # of /v1/responses: what the response repeats of its request, as JSON
    has_engine: bool = True  # else nothing was tokenized
    answer: bytes = b""  # of a request that needs no engine's work
    parsed: float = 0.0  # when its fields were checked and its texts not yet tokenized; seconds, time.perf_counter

    def check_engine(self) -> None:
        """Refuse a request that was read when nobody knew how long it may be.

        Raises:
            EngineUnavailableError: no engine was there.
        """
        if not self.has_engine:
            raise EngineUnavailableError("Not available: the engine has just started. Retry.")
