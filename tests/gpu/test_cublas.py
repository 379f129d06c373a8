# SPDX-License-Identifier: Apache-2.0
"""What cuBLAS is told of the SMs."""

from __future__ import annotations

import ctypes

import torch

from blink.kernels.gpu import cublas


def test_products_are_chosen_for_the_sms_beside_the_scheduler() -> None:
    library, handle, count = cublas.load("cublas"), cublas.handle(), ctypes.c_int()
    try:
        cublas.reserve_sm()
        assert library.cublasGetSmCountTarget(handle, ctypes.byref(count)) == 0
        assert count.value == torch.cuda.get_device_properties().multi_processor_count - cublas.RESIDENT
        x, w = torch.randn(384, 512, device="cuda"), torch.randn(256, 512, device="cuda")
        torch.testing.assert_close((x @ w.T).double(), x.double() @ w.double().T, rtol=1e-3, atol=1e-3)
    finally:
        assert library.cublasSetSmCountTarget(handle, 0) == 0
