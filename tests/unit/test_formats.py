# SPDX-License-Identifier: Apache-2.0
"""Number formats: names, numbers and C++ tags agree wherever they are written, and what is described is read back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

import blink
from blink.fields import Fields
from blink.formats.experts import Fp8Experts, PackedExperts, allocate_experts, multiply_experts
from blink.formats.gguf import GgufRows
from blink.formats.registry import FORMATS, STORAGES
from blink.formats.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_ROWS,
    INT4,
    STORED,
    FormatId,
    Quantization,
    describe_group,
    read_quantization,
)
from blink.kernels.cpu.gguf_weight import row_bytes
from blink.kernels.gpu.gemm.decode_hi_lo import name_order, order_number

HEADER = Path(blink.__file__).parent / "csrc" / "kernels" / "formats.h"


def test_names_of_kernels_are_those_of_the_header() -> None:
    found = re.search(r"enum class FormatId \{(.*)\};", HEADER.read_text())
    assert found is not None
    names = [f"blink::FormatId::{name.strip()}" for name in found[1].split(",")]
    hi_lo = (None, FormatId.FP8, FormatId.INT4)
    assert [name_order(one) for one in hi_lo] == names
    assert [order_number(one) for one in hi_lo] == list(range(len(names)))
    assert [one.cpp for one in (BF16, FP8_BLOCK, INT4)] == [
        f"{names[0]}, false",
        f"{names[1]}, true",
        f"{names[2]}, true",
    ]


def test_every_storage_has_its_reader() -> None:
    assert set(STORAGES) == set(STORED)
    for id, format in FORMATS.items():
        assert format.id is id
        assert all(STORED[name].format is id for name in format.storages)


def test_ggml_numbers_are_those_of_the_gguf_package_and_of_the_kernels() -> None:
    for one in FormatId:
        if one.ggml >= 0:
            assert gguf.GGMLQuantizationType(one.ggml).name == one.name
            assert FormatId.of_ggml(GgufRows(one.ggml, torch.empty(0)).format) is one
            assert (row_bytes(one.ggml, 256) > 0) == (one is not FormatId.Q5_K)  # which no CPU kernel takes
    with pytest.raises(KeyError):
        FormatId.of_ggml(-1)


@pytest.mark.parametrize("scheme", [FP8_ROWS, Quantization("packed"), Quantization("packed", group=32)])
def test_what_is_described_is_read_back(scheme: Quantization) -> None:
    group = describe_group(scheme)
    config = {"quant_method": "compressed-tensors", "format": group["format"], "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": group}
    assert read_quantization(Fields({"quantization_config": config}, "config.json")) == scheme


@pytest.mark.parametrize("storage", STORED)
def test_experts_are_kept_as_the_scheme_says(storage: str) -> None:
    scheme = Quantization(storage)
    found = allocate_experts(scheme, (2, 16, 384), torch.empty)
    assert isinstance(found, PackedExperts) and found.encoding == scheme.encoding
    numbers = found.values.nbytes + found.groups.nbytes
    assert numbers == 2 * 16 * 384 * scheme.weight_bytes
    rows = allocate_experts(FP8_ROWS, (2, 16, 384), torch.empty)
    assert isinstance(rows, Fp8Experts) and rows.encoding == FP8_ROWS.encoding


@pytest.mark.parametrize("scheme", [FP8_ROWS, *map(Quantization, ("fp8", "packed", "mxfp4"))], ids=str)
def test_each_expert_is_multiplied_by_its_factor(scheme: Quantization) -> None:
    torch.manual_seed(3)
    experts = allocate_experts(scheme, (3, 16, 384), torch.empty)
    for expert in range(3):
        drawn = FORMATS[scheme.format].draw(0.02 * torch.randn(16, 384), scheme)
        experts.store(expert, slice(None), drawn)
    factors = torch.tensor([0.3, 1.7, 5.0])
    expected = experts.dequantize(torch.float32) * factors[:, None, None]
    multiply_experts(experts, factors)
    torch.testing.assert_close(experts.dequantize(torch.float32), expected, rtol=1e-3, atol=0)


def test_schemes_need_no_torch() -> None:
    program = "import sys, blink.formats.schemes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
