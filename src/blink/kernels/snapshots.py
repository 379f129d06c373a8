# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states: what a step copies before its first layer, and after its last."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from blink.kernels.layer_cache import StateCache


class SnapshotRows(NamedTuple):
    """The rows of a step, and which of them have a snapshot."""

    marks: Tensor  # int32 [rows]; index + 1 of a row's snapshot; 0: it has none
    slots: Tensor  # int32 [rows]; of each row's sequence
    first: int  # the slot of the first snapshot


class CopyStates(Protocol):
    """Copies all that a group of layers keeps of the rows that have a snapshot."""

    def __call__(self, group: StateCache, rows: SnapshotRows, *, saves: bool) -> None:
        """Copy from the sequences' slots to the snapshots if it saves, else from the snapshots to the slots."""
        ...
