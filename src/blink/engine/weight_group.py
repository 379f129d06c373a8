# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""A group of processes in which a trainer broadcasts weights: an engine is one rank, and the trainer rank 0.

Keys in the store and the backend are those of a group that SGLang's init_custom_process_group() makes. gloo brings
tensors to the host's memory. nccl brings them to a GPU, which the host must have to itself then (device_leave.py).
"""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

from blink.errors import BadRequestError
from blink.fields import one_line
from blink.region.tensor_stream import TensorEntry

_WAIT: Final = timedelta(seconds=300)  # for the other ranks, and for each tensor
_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# How PyTorch treats a trainer that is killed: the broadcast fails after its time, and the engine goes on.
_NCCL_SETTINGS: Final = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class WeightGroup:
    """A group that this process has joined."""

    def __init__(self, name: str, address: str, port: int, rank: int, size: int, device: torch.device) -> None:
        """Join; blocks until all ranks have. address, port: where rank 0 keeps the group's store.

        device: where tensors are to come; a GPU's backend is nccl, whose ranks meet with the first broadcast.

        Raises:
            BadRequestError: they do not come.
        """
        self.device = device
        try:
            store = TCPStore(address, port, size, is_master=False, timeout=_WAIT)
            prefix = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            self._group = [_open(prefix, rank, size, device)]
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadRequestError(
                f"The group '{name}' at {address}:{port} cannot be joined: {one_line(error)}."
            ) from error
        # The group's end frees what it has on the device. A process that ends with a group aborts in gloo's threads.
        self._end = weakref.finalize(self, self._group.clear)

    def close(self) -> None:
        """Leave it."""
        self._end()

    def receive(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of the tensor that rank 0 broadcasts next.

        Raises:
            BadRequestError: it does not come, or its type cannot be broadcast.
        """
        if entry.dtype not in _TYPES:
            raise BadRequestError(f"'{entry.name}' has type {entry.dtype}, which cannot be broadcast.")
        tensor = torch.empty(entry.shape, dtype=_TYPES[entry.dtype], device=self.device)
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, _WAIT
        try:
            self._group[0].broadcast([tensor], options).wait()
            values = tensor.cpu()
        except RuntimeError as error:
            raise BadRequestError(f"The trainer's broadcast of '{entry.name}' failed: {one_line(error)}.") from error
        return bytes_of(values)


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in the host's memory."""
    return values.reshape(-1).view(torch.uint8).numpy().data


def _open(store: Store, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cpu":
        return ProcessGroupGloo(store, rank, size, _WAIT)
    os.environ.update(_NCCL_SETTINGS)
    nccl = distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _WAIT
    return nccl(store, rank, size, options)
