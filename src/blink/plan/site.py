# SPDX-License-Identifier: Apache-2.0
"""Bucket: a size of step that plans are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size of step that is captured as a graph."""

    tokens: int  # padding included
    rows: int
    decoding: bool = False  # whether every row is of one token, so that kernels made for that may run
    adapters: bool = False  # whether rows may have adapters (LoRA)
    skips_guesses: bool = False  # whether nothing is guessed of what follows rows, if anything does that

    @classmethod
    def of_graph(cls, tokens: int, rows: int, *, decoding: bool, does_more: bool, guesses: bool) -> Bucket:
        """Return the size of a graph, where there may be two of each: one of them does more.

        guesses: whether more is to guess what follows rows; else it is that rows may have adapters.
        """
        return cls(tokens, rows, decoding, does_more and not guesses, guesses and not does_more)

    @property
    def title(self) -> str:
        """The size in words."""
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        title = f"decode, {rows}" if self.decoding else f"prefill, {self.tokens} tokens of {rows}"
        return f"{title}, with adapters" if self.adapters else title


class Epilogue(Enum):
    """What becomes of a GEMM's results."""

    STORE = ""  # whoever reads them does the rest
    PARTIAL = "partial sums"  # to where the other ranks read them: an all-reduce adds them up


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    """Return the first reason that holds; None: none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)
