# SPDX-License-Identifier: Apache-2.0
"""Times the norm and activation kernels in the shapes of Llama-3-8B, against the time their bytes take at 4.3 TB/s."""

from __future__ import annotations

import torch
from median import median_us

from blink.kernels.gpu.activation import activate
from blink.kernels.gpu.rms_norm import rms_norm

_HIDDEN, _INTERMEDIATE = 4096, 14336
_BYTES_PER_US = 4.3e6


def main() -> None:
    """Print medians in microseconds of kernels replayed from a CUDA graph."""
    print(f"{'kernel':10} {'tokens':>6} {'us':>8} {'floor us':>8}")
    weight = torch.ones(_HIDDEN, dtype=torch.bfloat16, device="cuda")
    for num_tokens in (1, 32, 64, 256, 2048):
        x, residual = (torch.randn(num_tokens, _HIDDEN, device="cuda").bfloat16() for _ in range(2))
        gate_up = torch.randn(num_tokens, 2 * _INTERMEDIATE, device="cuda").bfloat16()
        cases = (
            ("rms_norm", lambda x=x, residual=residual: rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes),
            ("activate", lambda gate_up=gate_up: activate(gate_up), gate_up.nbytes * 3 // 2),
        )
        for name, call, num_bytes in cases:
            median = median_us(call)
            print(f"{name:10} {num_tokens:6} {median:8.2f} {num_bytes / _BYTES_PER_US:8.2f}")


if __name__ == "__main__":
    main()
