# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Copies to GPU memory while the resident scheduler runs: on a stream of their own, waited for by polling.

Nothing here allocates on the device or synchronises with it: the scheduler never ends.
"""

from __future__ import annotations

import time

from cuda.bindings import driver
from torch import Tensor

from blink.errors import EngineUnavailableError
from blink.kernels.gpu.launch import check

_LOOK_SECONDS = 0.0002
_COPY_SECONDS = 10.0


class Uploader:
    """Copies from locked memory of the host, one copy at a time; any thread may call it."""

    def __init__(self) -> None:
        """Make the stream, in the context of the calling thread; before the scheduler starts."""
        self._context = check(driver.cuCtxGetCurrent())
        self._stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Copy a contiguous tensor; blocks until it is there.

        Raises:
            EngineUnavailableError: the GPU does not copy.
        """
        assert source.is_pinned() and target.nbytes == source.nbytes
        check(driver.cuCtxSetCurrent(self._context))
        check(driver.cuMemcpyHtoDAsync(target.data_ptr(), source.data_ptr(), source.nbytes, self._stream))
        deadline = time.monotonic() + _COPY_SECONDS
        while (status := driver.cuStreamQuery(self._stream)[0]) == driver.CUresult.CUDA_ERROR_NOT_READY:
            if time.monotonic() > deadline:
                raise EngineUnavailableError("The GPU copies no adapter.")
            time.sleep(_LOOK_SECONDS)
        check((status,))
