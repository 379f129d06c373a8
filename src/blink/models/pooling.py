# SPDX-License-Identifier: Apache-2.0
"""Pooling: how a model that generates nothing makes a vector of a prompt. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolingKind = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What becomes of the last norm's outputs.

    kind: of which tokens: the last, the mean of all, or the first. normalizes: whether clients get embeddings of length
    1, or scores between 0 and 1. scores: whether a classifier with one output follows. score_tokens: the tokens whose
    logits' difference, the second's less the first's, is that output; None: the checkpoint has the classifier.
    """

    kind: PoolingKind = "last"
    normalizes: bool = True
    scores: bool = False
    score_tokens: tuple[int, int] | None = None

    def width(self, hidden_size: int) -> int:
        """Return the floats of a prompt's vector."""
        return 1 if self.scores else hidden_size
