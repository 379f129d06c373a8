# SPDX-License-Identifier: Apache-2.0
"""What runs the plans of a device: its kernels by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from blink.kernels.guesses import FindGuesses
from blink.kernels.layer_inputs import JoinInputs
from blink.kernels.recurrent import Advance
from blink.kernels.snapshots import CopyStates
from blink.plan.site import Bucket
from blink.runner.cpu_code import CpuCode
from blink.runner.planner import Device
from blink.runner.step import Kernels, Step
from blink.runner.stream import RunLayers, Stream


class DeviceCode(Protocol):
    """A device's kernels, and how its steps of other styles begin."""

    @property
    def device(self) -> Device:
        """The kernels, for the planner."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernels, by the names in plans."""
        ...

    @property
    def attentions(self) -> Mapping[str, Callable[[Step], Callable[[Tensor, int], Tensor]]]:
        """Those that attend from QKV on; each is prepared for a step, and then runs in the layer of an index."""
        ...

    @property
    def recurrences(self) -> Mapping[str, Advance]:
        """Those that advance a recurrent layer."""
        ...

    @property
    def copy_states(self) -> CopyStates:
        """What copies recurrent states to snapshots and from them."""
        ...

    @property
    def join_inputs(self) -> JoinInputs:
        """What computes the inputs that layers have of their own."""
        ...

    @property
    def find_guesses(self) -> FindGuesses:
        """What finds the rows behind which tokens are guessed."""
        ...

    def planned_size(self, bucket: Bucket) -> Bucket:
        """Return the size of step whose plan is that of a size, too."""
        ...

    def find_layers(self, step: Step, layers: range) -> RunLayers | None:
        """Return what runs some layers of a step in one call; None: nothing does."""
        ...

    def begin(self, step: Step) -> Stream:
        """Begin a step whose norms are no kernels."""
        ...


def code_of(device: torch.device, *, deterministic: bool = False) -> DeviceCode:
    """Return what runs the plans of a device; deterministic: by kernels that give a token the same bits in any step."""
    return _find_code(device, deterministic)


@functools.cache
def _find_code(device: torch.device, deterministic: bool) -> DeviceCode:
    if device.type == "cuda":
        from blink.runner.gpu_code import GpuCode

        return GpuCode(deterministic=deterministic)
    return CpuCode()
