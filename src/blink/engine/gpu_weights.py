# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, and PyTorch's calls for processes are not public.
# pyright: reportAttributeAccessIssue=false
"""A GPU engine's model as it is changed while it serves: other weights in the memory that its graphs read; sleep."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from cuda.bindings import driver

from blink.config import ModelConfig
from blink.engine.mapped_memory import MappedMemory
from blink.engine.same_model import open_same_model
from blink.engine.shared_tensors import find_handle
from blink.engine.sleeping_memory import SleepingMemory
from blink.engine.weight_group import bytes_of
from blink.errors import BadRequestError, ConfigError
from blink.fields import one_line
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.models.mtp import MtpHead
from blink.models.weights.loader import ModelSource
from blink.models.weights.mtp_loader import load_mtp
from blink.models.weights.overwriting import Overwrite, PartCheck
from blink.models.weights.staged_tensors import ReadTensor
from blink.region.tensor_stream import TensorEntry

_NO_HEAD: Final = (
    "An engine on a GPU with a draft head neither sleeps nor takes other weights, before that has run on one: restart "
    "it instead, or leave the head out of --speculative-config."
)
_NO_SLEEP: Final = "This engine does not sleep: start it with --enable-sleep-mode (docs/pause.md), or pause it instead."


class SleepingParts(NamedTuple):
    """Where an engine that may sleep has its weights, and what layers keep of sequences."""

    weights: SleepingMemory
    cells: SleepingMemory


def reserve_parts(device: torch.device) -> SleepingParts:
    """Return memory of a GPU for an engine that may sleep."""
    reserve = functools.partial(MappedMemory, device=device)
    return SleepingParts(SleepingMemory(reserve, device), SleepingMemory(reserve, device))


class GpuWeights:
    """Changes the weights of an engine that has its GPU to itself meanwhile (device_leave.py)."""

    def __init__(self, model: Decoder, parts: SleepingParts | None) -> None:
        """parts: where the model lies if it may sleep."""
        self._model, self._parts = model, parts

    def check_sleep(self) -> None:
        """Refuse to sleep where memory cannot be freed.

        Raises:
            ConfigError: that is so.
        """
        if self._parts is None:
            raise ConfigError(_NO_SLEEP)
        self._check_head()

    def open_weights(self, config: ModelConfig, newer: Sequence[Path]) -> ModelSource:
        """Open weights of the same model, once all of them are known to fit; newer: as open_model() has it.

        Raises:
            ConfigError: they do not fit the model, or are not there, or there is no memory to load a layer beside it.
        """
        self._check_head()
        if self._parts is not None:
            self._parts.weights.map()
        open_same_model(self._model, config, newer).check_over(self._model)
        self._place_head(config, PartCheck(self._model))
        return open_same_model(self._model, config, newer)  # anew: random weights are drawn from the first on

    def load_weights(self, source: ModelSource) -> None:
        """Write weights over those that are there.

        Raises:
            ConfigError: that fails, and the weights are undefined.
        """
        source.write_over(self._model)
        self._place_head(source.config, Overwrite(self._model))

    @torch.inference_mode()
    def _place_head(self, config: ModelConfig, place: PartCheck) -> None:
        """Place the head that the same files hold, where the model has one of these.

        Raises:
            ConfigError: it differs in its form, or is not there.
        """
        if isinstance(self._model.head, MtpHead):
            place("head", load_mtp(config, self._model))

    def open_shared(self, entries: Sequence[TensorEntry], handles: Sequence[Mapping[str, Any]]) -> ReadTensor:
        """Return what reads tensors in another process's memory of this GPU; handles: of each, by the UUIDs of GPUs.

        Raises:
            BadRequestError: one lies elsewhere, or its handle is another tensor's.
        """
        device = self._model.device
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        own = {entry.name: find_handle(entry, one, uuid) for entry, one in zip(entries, handles, strict=True)}
        return lambda entry: [_read_shared(entry, own[entry.name], device)]

    def free_weights(self) -> None:
        """Free the weights."""
        self._find_parts().weights.unmap()

    def store_weights(self) -> None:
        """Free the weights, and keep them in the host's memory.

        Raises:
            ConfigError: the host has too little; the GPU keeps them then.
        """
        self._find_parts().weights.save()

    def restore_weights(self) -> None:
        """Take stored weights back.

        Raises:
            ConfigError: there is too little memory.
        """
        self._find_parts().weights.map()

    def free_kv_cache(self) -> None:
        """Free the KV cache."""
        self._find_parts().cells.unmap()

    def fill_kv_cache(self) -> None:
        """Take the KV cache's memory back, all zeros.

        Raises:
            ConfigError: there is too little.
        """
        self._find_parts().cells.map()

    def _check_head(self) -> None:
        if isinstance(self._model.head, EagleHead):
            raise ConfigError(_NO_HEAD)

    def _find_parts(self) -> SleepingParts:
        self.check_sleep()
        assert self._parts is not None
        return self._parts


def _read_shared(entry: TensorEntry, handle: Mapping[str, Any], device: torch.device) -> memoryview:
    """Return the bytes of a tensor by a handle that was checked.

    Raises:
        BadRequestError: it cannot be opened: the process has ended, or the handle is none.
    """
    opened, counter, event = (bytes.fromhex(handle[name]) for name in ("handle", "counter", "event"))
    counts = counter, handle["counter_offset"], event, handle["awaits_event"]
    place = device.index or 0, opened, handle["num_bytes"], handle["offset_bytes"]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*place, *counts)
    except RuntimeError as error:
        raise BadRequestError(
            f"'{entry.name}' cannot be reached in the trainer's memory: {one_line(error)}."
        ) from error
    status, base, size = driver.cuMemGetAddressRange(storage.data_ptr())
    if int(status) != 0 or storage.data_ptr() + storage.nbytes() > int(base) + int(size):
        raise BadRequestError(f"'{entry.name}' has a handle that reaches beyond the trainer's memory.")
    shared = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=device)
    shared.set_(storage, handle["offset"], tuple(handle["shape"]), tuple(handle["stride"]))
    return bytes_of(shared.cpu().contiguous())
