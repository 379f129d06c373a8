# SPDX-License-Identifier: Apache-2.0
"""A PyTorch whose cuBLAS is not a library of its own."""

from __future__ import annotations

import logging

import pytest
import torch

from blink.kernels.gpu import cublas


def test_a_pytorch_without_that_library_boots_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "9999.0")
    with caplog.at_level(logging.WARNING, "blink.engine"):
        cublas.reserve_sm()
    assert "libcublas.so.9999" in caplog.text
