# SPDX-License-Identifier: Apache-2.0
"""What speculation came to between two samples of the metrics, and how that reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from blink.view.samples import Samples


class FigureRow(NamedTuple):
    """A row of the screen that a server may lack."""

    title: str
    text: str  # empty: the row is not shown
    charted: float | None = None  # what its chart has of now; None: it has no chart


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What speculation came to."""

    drafted_rate: float  # tokens per second
    accepted_rate: float
    tokens_per_step: float | None  # of a sequence, in the steps that verified a draft of it


def compare_drafts(now: Samples, grown: Callable[[str], float], seconds: float) -> DraftFigures | None:
    """Return the figures of some seconds; None: the server has never verified a draft.

    grown: what a counter has grown by.
    """
    if not now.value("vllm:spec_decode_num_drafts_total"):
        return None
    drafts, drafted, accepted = (
        grown(f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return DraftFigures(drafted / seconds, accepted / seconds, (drafts + accepted) / drafts if drafts > 0 else None)


def list_rows(figures: DraftFigures | None) -> tuple[FigureRow, FigureRow]:
    """Return what the screen shows of drafts."""
    titles = "drafts", "tokens with a draft"
    if figures is None:
        return FigureRow(titles[0], "", 0.0), FigureRow(titles[1], "")
    rates = f"{figures.drafted_rate:,.1f} tokens/s, {figures.accepted_rate:,.1f} accepted"
    per_step = "-" if figures.tokens_per_step is None else f"{figures.tokens_per_step:.2f}"
    return FigureRow(titles[0], rates, figures.accepted_rate), FigureRow(titles[1], f"{per_step} a step")
