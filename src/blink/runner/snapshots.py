# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states: which rows of a step begin with one, and which leave one, the scheduler has said."""

from __future__ import annotations

from torch import Tensor

from blink.runner.step import Step


def load_snapshots(step: Step) -> None:
    """Copy what some rows begin with into their slots, before the first layer."""
    if step.kv_cache.first_snapshot is not None:
        slots, snapshots = _find_pairs(step, step.batch.state_sources, step.kv_cache.first_snapshot)
        _copy(step, snapshots, slots)


def keep_snapshots(step: Step) -> None:
    """Copy what some rows end with out of their slots, behind the last layer."""
    if step.kv_cache.first_snapshot is not None:
        slots, snapshots = _find_pairs(step, step.batch.state_targets, step.kv_cache.first_snapshot)
        _copy(step, slots, snapshots)


def _find_pairs(step: Step, marks: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the slots of the rows that have a snapshot, and those of the snapshots."""
    marks = marks[: step.bucket.rows]
    [rows] = marks.nonzero(as_tuple=True)
    return step.batch.row_slots[rows].long(), marks[rows].long() + first - 1


def _copy(step: Step, sources: Tensor, targets: Tensor) -> None:
    if len(sources) > 0:
        for cache in step.kv_cache.recurrent.values():
            cache.states[targets] = cache.states[sources]
            cache.inputs[targets] = cache.inputs[sources]
