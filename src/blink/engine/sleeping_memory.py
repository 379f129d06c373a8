# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model whose memory is freed while an engine sleeps, and then is there again under the same addresses.

The host keeps their values meanwhile if they are saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.models.weights.overwriting import list_tensors

_ALIGNMENT = 256  # bytes, as PyTorch's allocator has it
_NO_ROOM: Final = (
    "The host has too little memory for the weights, so the GPU keeps them: wake the engine up, or sleep at level 2."
)


class Memory(Protocol):
    """What mapped_memory.py's MappedMemory is."""

    def map(self) -> None:
        """Back it."""
        ...

    def unmap(self) -> None:
        """Free it."""
        ...

    def view(self) -> Tensor:
        """Return it as uint8."""
        ...


class SleepingMemory:
    """Ranges of memory that are mapped and unmapped together."""

    def __init__(self, reserve: Callable[[int], Memory], device: torch.device) -> None:
        """reserve: returns mapped memory of a device, of at least so many bytes."""
        self._reserve, self._device = reserve, device
        self._ranges: list[Memory] = []
        self._moved = set[int]()  # addresses of tensors that lie here
        self._saved: list[Tensor] = []  # the bytes of each range, while the host has them
        self.is_mapped = True

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros here; as layer_cache.py's allocate_cache()."""
        assert device == self._device
        count = math.prod(shape)
        view = self._add(max(count * dtype.itemsize, 1))
        return view[: count * dtype.itemsize].view(dtype).view(shape)

    def place(self, name: str, part: Any) -> Any:
        """Move the tensors of a part of a model here, and return the part; for DecoderLoader's `place`."""
        del name
        own = {id(one): one for one in list_tensors(part) if self._takes(one)}
        spans = [(one, _count_bytes(one)) for one in own.values()]
        if not spans:
            return part
        view, begin = self._add(sum(size for _, size in spans)), 0
        for tensor, size in spans:
            flat = view[begin : begin + size].view(tensor.dtype)
            moved = flat.as_strided(tensor.shape, tensor.stride())
            moved.copy_(tensor)
            tensor.set_(moved.untyped_storage(), moved.storage_offset(), tensor.shape, tensor.stride())
            self._moved.add(tensor.data_ptr())
            begin += size
        return part

    def save(self) -> None:
        """Free all of it, and keep its bytes in locked memory of the host, from where map() puts them back.

        Raises:
            ConfigError: the host has too little memory; nothing is freed then.
        """
        if not self.is_mapped:
            return
        views, is_gpu = [one.view() for one in self._ranges], self._device.type == "cuda"
        try:
            saved = [torch.empty(len(view), dtype=torch.uint8, pin_memory=is_gpu) for view in views]
        except RuntimeError as error:
            raise ConfigError(_NO_ROOM) from error
        _copy(views, saved, self._device)
        self.unmap()
        self._saved = saved

    def unmap(self) -> None:
        """Free all of it."""
        self._saved = []
        if self.is_mapped:
            self.is_mapped = False
            for one in self._ranges:
                one.unmap()

    def map(self) -> None:
        """Take the memory back: with what was saved, or all zeros.

        Raises:
            ConfigError: there is too little; all of it is unmapped then.
        """
        if self.is_mapped:
            return
        for count, one in enumerate(self._ranges):
            try:
                one.map()
            except ConfigError as error:
                for mapped in self._ranges[:count]:
                    mapped.unmap()
                raise ConfigError("There is too little GPU memory to wake up: end what has taken it.") from error
        self.is_mapped = True
        views = [one.view() for one in self._ranges]
        _copy(self._saved, views, self._device)
        for view in views[len(self._saved) :]:
            view.zero_()
        self._saved = []

    def _add(self, num_bytes: int) -> Tensor:
        self._ranges.append(self._reserve(num_bytes))
        return self._ranges[-1].view().zero_()

    def _takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is to move here: it is on the device, and not here yet."""
        return tensor.device == self._device and tensor.numel() > 0 and tensor.data_ptr() not in self._moved


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device) -> None:
    """Copy each tensor to that of its place, and wait for the end."""
    for source, target in zip(sources, targets, strict=False):
        target.copy_(source, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first number to its last, filled up to the next tensor's place."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return -(-reach * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
