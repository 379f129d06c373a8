# SPDX-License-Identifier: Apache-2.0
"""Times the mixture of experts in the shapes of Qwen3-30B-A3B, against the time that the weights used take at 4.3 TB/s
or the arithmetic at 790 TFLOP/s.
"""

from __future__ import annotations

import torch
from median import median_us

from blink.kernels.cpu.moe import route
from blink.kernels.gpu.moe.grouped import moe

_EXPERTS, _TOP_K, _HIDDEN, _SIZE = 128, 8, 2048, 768
_BYTES_PER_US, _FLOPS_PER_US = 4.3e6, 790e6


def main() -> None:
    """Print medians in microseconds of all kernels replayed from a CUDA graph."""
    print(f"{'tokens':>6} {'us':>8} {'floor us':>8}")
    gate_up = torch.randn(_EXPERTS, 2 * _SIZE, _HIDDEN, device="cuda").bfloat16() * 0.02
    down = torch.randn(_EXPERTS, _HIDDEN, _SIZE, device="cuda").bfloat16() * 0.02
    for num_tokens in (1, 8, 32, 64, 256, 2048):
        x = torch.randn(num_tokens, _HIDDEN, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, _EXPERTS, device="cuda").bfloat16()
        count = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")

        def call(x: torch.Tensor = x, logits: torch.Tensor = logits, count: torch.Tensor = count) -> None:
            moe(x, logits, gate_up, down, count, top_k=_TOP_K, renormalize=True)

        num_used = route(logits, top_k=_TOP_K, renormalize=True)[1].unique().numel()
        memory = num_used * (gate_up[0].nbytes + down[0].nbytes) / _BYTES_PER_US
        arithmetic = 6 * num_tokens * _TOP_K * _HIDDEN * _SIZE / _FLOPS_PER_US
        median = median_us(call)
        print(f"{num_tokens:6} {median:8.2f} {max(memory, arithmetic):8.2f}")


if __name__ == "__main__":
    main()
