# SPDX-License-Identifier: Apache-2.0
"""Updates of weights that come tensor by tensor: from a stream, a group of processes, or another process's GPU memory.

Tensors wait in files while the engine serves; ModelControl loads them as it loads weights from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch

from blink.engine.weight_group import WeightGroup
from blink.errors import BadRequestError
from blink.models.weights.files import resolve_model
from blink.models.weights.staged_tensors import ReadTensor, StagedTensors
from blink.region.tensor_stream import TensorEntry, make_entry

OpenShared = Callable[[Sequence[TensorEntry], Sequence[Mapping[str, Any]]], ReadTensor]


class TensorUpdates:
    """Takes the tensors of an update in one part, or in several between begin() and commit()."""

    def __init__(self, device: torch.device, have_device: Callable[[Callable[[], None]], None]) -> None:
        """device: the model's; have_device: runs what allocates on it, or waits for it."""
        self._device, self._have_device = device, have_device
        self._staged: StagedTensors | None = None
        self._groups = dict[str, WeightGroup]()
        self.is_open = False  # whether further parts are to come

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of all tensors that have come for the model, the newest last."""
        return () if self._staged is None else tuple(self._staged.files)

    def begin(self) -> None:
        """Let the parts that come be one update; what has come of another is dropped."""
        self.is_open = True
        self.drop()

    def receive(self, model: str, stream: BufferedIOBase) -> None:
        """Take a part for a model from a stream of safetensors.

        Raises:
            BadRequestError: it is malformed, does not fit the model, or ends early; nothing of it is kept.
        """
        self._stage(model).receive(stream)

    def broadcast(self, model: str, group: str, tensors: Sequence[Sequence[Any]]) -> None:
        """Take a part that rank 0 of a group broadcasts. tensors: name, type and shape of each, in its order.

        Raises:
            BadRequestError: there is no such group, the tensors do not fit the model, or do not come.
        """
        if group not in self._groups:
            raise BadRequestError(f"There is no group '{group}': POST /init_weights_update_group first.")
        staged, entries = self._stage(model), [make_entry(*one) for one in tensors]
        staged.check(entries)  # a refusal after the first broadcast would leave the trainer's others unheard
        joined = self._groups[group]
        try:
            self._run_on(joined.device, lambda: staged.store(entries, lambda entry: [joined.receive(entry)]))
        except BadRequestError:
            self.leave(group)  # its ranks no longer agree on what comes next
            raise

    def share(
        self,
        model: str,
        open_shared: OpenShared,
        tensors: Sequence[Sequence[Any]],
        handles: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take a part that lies in another process's memory of this GPU.

        open_shared: returns what reads tensors; handles: of each, by GPU, as ipc_handles.py reads them.

        Raises:
            BadRequestError: it lies elsewhere, or does not fit the model.
        """
        entries = [make_entry(*one) for one in tensors]
        read, staged = open_shared(entries, handles), self._stage(model)
        self._run_on(self._device, lambda: staged.store(entries, read))

    def join(self, name: str, address: str, port: int, rank: int, size: int, backend: str = "") -> None:
        """Join a group; one of that name is left first. backend: gloo or nccl; empty: that of the model's device.

        Raises:
            BadRequestError: it cannot be joined.
        """
        is_nccl = (backend or ("gloo" if self._device.type == "cpu" else "nccl")) == "nccl"
        if is_nccl and self._device.type == "cpu":
            raise BadRequestError("backend nccl needs an engine on a GPU; this one is on a CPU, which has gloo.")
        device = self._device if is_nccl else torch.device("cpu")
        self.leave(name)

        def join() -> None:
            self._groups[name] = WeightGroup(name, address, port, rank, size, device)

        self._run_on(device, join)

    def leave(self, name: str) -> None:
        """Leave a group, if it was joined."""
        group = self._groups.get(name)
        if group is not None:
            self._run_on(group.device, lambda: self._groups.pop(name).close())

    def end(self) -> None:
        """Expect no further part, and refuse an update without tensors.

        Raises:
            BadRequestError: nothing has come.
        """
        self.is_open = False
        if self._staged is None or not self._staged.has_waiting:
            raise BadRequestError("No tensor has come since the last update.")

    def commit(self) -> None:
        """Note that what has come is loaded."""
        if self._staged is not None:
            self._staged.commit()

    def drop(self) -> None:
        """Drop what has come and is not loaded."""
        if self._staged is not None:
            self._staged.forget_waiting()

    def close(self) -> None:
        """Drop all tensors, as the model's weights are others, or the engine ends."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def _run_on(self, device: torch.device, job: Callable[[], None]) -> None:
        if device.type == "cpu":
            job()
        else:
            self._have_device(job)

    def _stage(self, model: str) -> StagedTensors:
        if self._staged is None:
            self._staged = StagedTensors(resolve_model(model))
        if not self.is_open:
            self.drop()
        return self._staged
