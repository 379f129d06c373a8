# SPDX-License-Identifier: Apache-2.0
"""Matrices of a GGUF file that stay quantized on a CPU: they lie where the file is mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from blink.config import ModelConfig
from blink.kernels.cpu.gguf_weight import GgufWeight
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from gguf_conversion import convert
from quantized_checkpoints import write_checkpoints


def find_mapping(address: int) -> str:
    """Return the file that is mapped at an address of this process; nothing for memory of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return name
    raise AssertionError("no memory is there")


def test_weights_of_a_gguf_file_are_not_copied(tmp_path: Path) -> None:
    _, plain = write_checkpoints(tmp_path, "awq")
    path = tmp_path / "model.gguf"
    convert(plain, path, gguf.MODEL_ARCH.QWEN3, read_spec(plain), (gguf.GGMLQuantizationType.Q8_0,))
    model = load_model(ModelConfig(model=str(path)), torch.device("cpu"), torch.float32)
    weights = [layer.output for layer in model.layers] + [layer.qkv for layer in model.layers]
    for weight in weights:
        assert isinstance(weight, GgufWeight)
        assert [find_mapping(blocks.data_ptr()) for blocks in weight._blocks] == [str(path)] * len(weight._blocks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "float32", "kv_cache_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_a_cpu_keeps_keys_and_values_in_16_bits_by_default(
    options: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    _, plain = write_checkpoints(tmp_path, "awq")
    dtype = torch.bfloat16 if options.get("dtype") == "bfloat16" else torch.float32
    model = load_model(ModelConfig(model=str(plain), **options), torch.device("cpu"), dtype)
    assert model.kv_dtype == expected
    assert model.allocate_kv_cache(2, 16).first.dtype == expected
