# SPDX-License-Identifier: Apache-2.0
"""OpenAI's predicted outputs: text that an answer may have much of, for speculative decoding."""

from __future__ import annotations

from typing import Literal

from blink.api.serving.body import Body


class PredictionPart(Body):
    """A part of a prediction."""

    type: Literal["text"] = "text"
    text: str


class PredictionBody(Body):
    """What an answer may have much of; OpenAI calls it a predicted output."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """Return the text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
