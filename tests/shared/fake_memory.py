# SPDX-License-Identifier: Apache-2.0
"""Memory of the host in place of a GPU's that is mapped and unmapped."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from blink.errors import ConfigError

_PAGE = 4096


class FakeMemory:
    """Bytes that are spoilt while they are unmapped; all of them together have a limit."""

    limit, mapped_bytes = 1 << 40, 0

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.empty(-(-num_bytes // _PAGE) * _PAGE, np.uint8)
        self.is_mapped = False
        self.map()

    def map(self) -> None:
        """Take the bytes."""
        assert not self.is_mapped
        if FakeMemory.mapped_bytes + len(self.bytes) > FakeMemory.limit:
            raise ConfigError("CUDA error CUDA_ERROR_OUT_OF_MEMORY")
        FakeMemory.mapped_bytes += len(self.bytes)
        self.is_mapped = True
        self.bytes.fill(0xFF)

    def unmap(self) -> None:
        """Give them back."""
        assert self.is_mapped
        FakeMemory.mapped_bytes -= len(self.bytes)
        self.is_mapped = False
        self.bytes.fill(0xEE)

    def view(self) -> Tensor:
        """Return all of them."""
        return torch.from_numpy(self.bytes)
