# SPDX-License-Identifier: Apache-2.0
"""What every response needs to know. Endpoints add what theirs must contain, when they read a request."""

from __future__ import annotations

from dataclasses import dataclass

from blink.api.serving.response_store import Keeper
from blink.text.message.parser import MessageForm
from blink.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Reply:
    """The form of one response. Who reads a request leaves the first six fields to who answers it."""

    id: str = ""
    created: int = 0  # seconds since 1970
    model: str = ""
    fingerprint: str = ""  # OpenAI's system_fingerprint; empty: none is told
    tokenizer: Tokenizer | None = None
    keeper: Keeper | None = None  # stores the answer for later requests
    message: MessageForm | None = None  # how the text is read; None: it is the content
