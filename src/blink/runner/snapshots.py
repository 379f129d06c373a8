# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states: which rows of a step begin with one, and which leave one, the scheduler has said."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.snapshots import CopyStates, SnapshotRows
from blink.runner.step import Step


def load_snapshots(step: Step, copy: CopyStates) -> None:
    """Copy what some rows begin with into their slots, before the first layer."""
    _copy_marked(step, step.batch.state_sources, copy, saves=False)


def save_snapshots(step: Step, copy: CopyStates) -> None:
    """Copy what some rows end with out of their slots, after the last layer."""
    _copy_marked(step, step.batch.state_targets, copy, saves=True)


def _copy_marked(step: Step, marks: Tensor, copy: CopyStates, *, saves: bool) -> None:
    if step.kv_cache.snapshots is None:
        return
    groups, first = step.kv_cache.snapshots
    rows = slice(step.bucket.rows)
    for group in groups:
        copy(group, SnapshotRows(marks[rows], step.batch.row_slots[rows], first), saves=saves)
