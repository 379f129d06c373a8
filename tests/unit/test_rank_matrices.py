# SPDX-License-Identifier: Apache-2.0
"""Matrices that stay quantized on ranks of GPUs: each rank's part is that of the dequantized matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.formats.experts import Fp8Experts, PackedExperts
from blink.formats.packed import PackedWeight
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights
from blink.models.weights import packed_loader
from model_families import MXFP4, save_model
from quantized_checkpoints import write_checkpoints
from rank_models import dense, load_parts

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}


def list_weights(layer: LayerWeights) -> Iterator[Any]:
    yield from (layer.qkv, layer.output)
    mlp = layer.mlp
    assert isinstance(mlp, DenseWeights | MoeWeights)
    yield from (mlp.gate_up, mlp.down)


def read(weight: Any) -> Tensor:
    if isinstance(weight, Tensor):
        return dense(weight).float()
    return weight.dequantize().float() if isinstance(weight, PackedWeight) else weight.dequantize(torch.float32)


def compare_ranks(path: Path, size: int, monkeypatch: pytest.MonkeyPatch, kinds: set[type]) -> None:
    """Compare what ranks of GPUs hold with what ranks of a CPU do, where all is dequantized."""
    expected = load_parts(path, size)
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda _: True)
    found = load_parts(path, size)
    seen: set[type] = set()
    for part, wanted in zip(found, expected, strict=True):
        pairs = zip(part.layers, wanted.layers, strict=True)
        for layer, other in pairs:
            for one, exact in zip(list_weights(layer), list_weights(other), strict=True):
                seen.add(type(one))
                assert tuple(one.shape) == tuple(exact.shape)
                torch.testing.assert_close(read(one), read(exact), rtol=1e-2, atol=1e-6)
        assert tuple(part.lm_head.shape) == tuple(wanted.lm_head.shape)
        torch.testing.assert_close(read(part.lm_head), read(wanted.lm_head), rtol=1e-2, atol=1e-6)
    assert kinds <= seen


@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-tensor", "fp8-block", "awq", "gptq", "packed", "packed-head"])
def test_parts_of_matrices_stay_quantized(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_checkpoints(tmp_path, scheme)
    compare_ranks(path, 2, monkeypatch, {PackedWeight})


WIDTHS = [("fp8-channel", 128), ("fp8-block", 256), ("fp8-block", 128), ("awq", 128)]


@pytest.mark.parametrize(("scheme", "width"), WIDTHS)
def test_experts_stay_quantized_in_parts_and_whole(
    scheme: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 columns that share a scale a rank has whole experts."""
    path, _ = write_checkpoints(tmp_path, scheme, **EXPERTS, hidden_size=128, moe_intermediate_size=width)
    kind = Fp8Experts if scheme == "fp8-channel" else PackedExperts
    compare_ranks(path, 2, monkeypatch, {kind})


def test_all_experts_of_a_tensor_stay_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(MXFP4, tmp_path)
    compare_ranks(tmp_path, 2, monkeypatch, {PackedExperts})


def test_an_output_layer_that_ranks_cannot_pack_alike_is_dequantized_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_checkpoints(tmp_path, "packed-head", vocab_size=136)
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda _: True)
    assert [type(part.lm_head) for part in load_parts(path, 2)] == [Tensor, Tensor]
