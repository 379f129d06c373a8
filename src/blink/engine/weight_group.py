# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""A group of processes in which a trainer broadcasts weights: an engine is one rank, and the trainer rank 0.

Keys in the store and the backend are those of a group that SGLang's init_custom_process_group() makes with gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

from blink.errors import BadRequestError
from blink.fields import one_line
from blink.region.tensor_stream import TensorEntry

_WAIT: Final = timedelta(seconds=300)  # for the other ranks, and for each tensor
_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class WeightGroup:
    """A group that this process has joined."""

    def __init__(self, name: str, address: str, port: int, rank: int, size: int) -> None:
        """Join; blocks until all ranks have. address, port: where rank 0 keeps the group's store.

        Raises:
            BadRequestError: they do not come.
        """
        try:
            store = TCPStore(address, port, size, is_master=False, timeout=_WAIT)
            prefix = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            self._group = ProcessGroupGloo(prefix, rank, size, _WAIT)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadRequestError(
                f"The group '{name}' at {address}:{port} cannot be joined: {one_line(error)}."
            ) from error

    def receive(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of the tensor that rank 0 broadcasts next.

        Raises:
            BadRequestError: it does not come, or its type cannot be broadcast.
        """
        if entry.dtype not in _TYPES:
            raise BadRequestError(f"'{entry.name}' has type {entry.dtype}, which cannot be broadcast.")
        tensor = torch.empty(entry.shape, dtype=_TYPES[entry.dtype])
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, _WAIT
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise BadRequestError(f"The trainer's broadcast of '{entry.name}' failed: {one_line(error)}.") from error
        return tensor.reshape(-1).view(torch.uint8).numpy().data
