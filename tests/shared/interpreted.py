# SPDX-License-Identifier: Apache-2.0
"""Which tests of GPU kernels run in Triton's interpreter too, on the CPU, and how."""

from __future__ import annotations

TESTS = tuple(
    f"tests/gpu/test_{name}.py"
    for name in (
        "activation",
        "attention",
        "delta_rule_gpu",
        "gguf_matmul",
        "latent_gpu",
        "layer_inputs",
        "lora_update",
        "mamba_gpu",
        "moe",
        "quantized",
        "rms_norm",
        "rotary",
        "router_gpu",
        "shared_gate",
        "snapshot_copies",
    )
)
EVERY_CASE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
SOME_CASES = {**EVERY_CASE, "BLINK_TEST_CASES": "1"}  # of each test
