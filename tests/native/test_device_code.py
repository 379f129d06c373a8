# SPDX-License-Identifier: Apache-2.0
"""CUDA sources compile for Hopper, with NVIDIA's run-time compiler and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

launch = pytest.importorskip("blink.kernels.gpu.launch", reason="needs cuda-core, which has no package here")
device_code = pytest.importorskip("blink.engine.device_code")

ARCH = "sm_90a"
KERNELS = Path(launch.__file__).parents[2] / "csrc" / "kernels"
# Some kernels of each file whose templates nothing else instantiates here, each in a second or so.
NAMES = {
    "comm/all_reduce.cu": ("blink::end_step<1>", "blink::all_reduce<blink::Bf16, void>"),
    "comm/all_reduce_spread.cu": (
        "blink::all_reduce_spread<blink::Bf16, float, 2, 4, 1>",
        "blink::all_reduce_spread<float, blink::Bf16, 8, 8, 4>",
    ),
    "comm/pull_batch.cu": ("blink::pull_batch<256>",),
    "decode.cu": (
        "blink::shrink<32, 8, 4>",
        "blink::gemm_updated<32, 1, 2, 256, 4, blink::Output::kAdd, false, blink::FormatId::kBf16>",
        "blink::gemm_updated<48, 2, 2, 128, 2, blink::Output::kGate, true, blink::FormatId::kBf16>",
    ),
    "recurrent/invert.cu": ("blink::invert<128>",),
    "sampler/constrain.cu": ("blink::find_places", "blink::list_allowed_tokens"),
}


def test_the_resident_scheduler_compiles() -> None:
    assert len(device_code.compile_source(ARCH, "ltoir").code) > 100_000


@pytest.mark.parametrize("source", sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cu")))
def test_kernels_compile(source: str) -> None:
    code = launch.compile_code(ARCH, NAMES.get(source, ()), source)
    for name in NAMES.get(source, ()):
        assert code.symbol_mapping[name].decode() in code.code.decode(errors="replace")
