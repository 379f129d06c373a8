# SPDX-License-Identifier: Apache-2.0
"""Copies of recurrent states on the CPU."""

from __future__ import annotations

from blink.kernels.layer_cache import StateCache
from blink.kernels.snapshots import SnapshotRows


def copy_states(group: StateCache, rows: SnapshotRows, *, saves: bool) -> None:
    """Compute CopyStates of kernels/snapshots.py."""
    [marked] = rows.marks.nonzero(as_tuple=True)
    if len(marked) == 0:
        return
    slots, snapshots = rows.slots[marked].long(), rows.marks[marked].long() + rows.first - 1
    sources, targets = (slots, snapshots) if saves else (snapshots, slots)
    for kept in (group.states, group.inputs):
        kept[:, targets] = kept[:, sources]
