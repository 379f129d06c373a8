# SPDX-License-Identifier: Apache-2.0
"""The thresholds of rows with top-k, top-p or min-p, each searched by a cluster of thread blocks."""

from __future__ import annotations

import ctypes

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.decode.launch import compile_kernel, launch
from blink.kernels.gpu.sampling_rows import Parts

_THREADS, _CLUSTER = 256, 8  # csrc/gpu/decode/truncation.cuh's kTruncationThreads and kTruncationCluster
_SUMS_BYTES = 4 * 16 * (_THREADS // 32 + 2 * _CLUSTER)  # truncation.cu's TruncationShared, without the values
_BINS_BYTES = 2 * 4 * 1024 + 4 * 2 * (_THREADS // 32 + _CLUSTER) + 32  # truncation_bins.cu's BinsShared


class _Arguments(ctypes.Structure):  # truncation.cuh's TruncationArgs
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("lowest", ctypes.c_void_p),
        ("header", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("thresholds", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("width", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32),
    ]


def find_thresholds(
    parts: Parts, batch: Batch, thresholds: Tensor, arrivals: Tensor, width: int, *, by_bins: bool = False
) -> None:
    """Write the least logit that may be drawn of each truncated row to thresholds, and 0 to its arrivals.

    parts: of the rows, `width` logits of each; thresholds: float32 [rows], NaN where nothing can be sampled; by_bins:
    search by truncation_bins.cu's histograms, which meet a mass to a few millionths.
    """
    num_rows, num_parts = parts.best.shape
    assert width % 4 == 0 and batch.params.is_contiguous()
    arguments = _Arguments(
        parts.scaled.data_ptr(),
        parts.best.data_ptr(),
        parts.lowest.data_ptr(),
        batch.header.data_ptr(),
        batch.row_slots.data_ptr(),
        batch.params.data_ptr(),
        thresholds.data_ptr(),
        arrivals.data_ptr(),
        width,
        num_parts,
    )
    values_bytes = -(-width // 4 // _CLUSTER) * 16
    bins, cuts = ("find_thresholds_by_bins", "truncation_bins.cu"), ("find_thresholds", "truncation.cu")
    name, source = bins if by_bins else cuts
    launch(
        compile_kernel(f"blink::{name}", f"decode/{source}"),
        (_CLUSTER, num_rows),
        _THREADS,
        arguments,
        cluster=_CLUSTER,
        shared_bytes=(_BINS_BYTES if by_bins else _SUMS_BYTES) + values_bytes,
    )
