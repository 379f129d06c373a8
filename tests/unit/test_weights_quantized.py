# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: each scheme gives the logits of its dequantised weights; others are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blink.errors import ConfigError
from blink.fields import Fields
from blink.formats.fp8 import quantize_fp8
from blink.formats.schemes import FP8_ROWS, Quantization, read_quantization
from blink.models.weights.checkpoint import DummyCheckpoint
from blink.models.weights.quantized_checkpoint import DummyMatrices
from model_driver import load, logits
from quantized_checkpoints import SCHEMES, compressed, write_checkpoints

CPU = torch.device("cpu")
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_quantized_checkpoint_gives_the_logits_of_its_weights(tmp_path: Path, scheme: str) -> None:
    quantized, plain = write_checkpoints(tmp_path, scheme)
    expected = logits(load(plain))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(load(quantized)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["fp8-block", "awq"])
def test_so_do_quantized_experts(tmp_path: Path, scheme: str) -> None:
    quantized, plain = write_checkpoints(tmp_path, scheme, **EXPERTS)
    torch.testing.assert_close(logits(load(quantized)), logits(load(plain)), rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_to_fp8_on_request(tmp_path: Path) -> None:
    _, plain = write_checkpoints(tmp_path, "fp8-channel")
    tensors = load_file(plain / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            tensors[name] = quantize_fp8(values).dequantize(torch.float32)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, rounded / "model.safetensors")
    found, exact = logits(load(plain, quantization="fp8")), logits(load(plain))
    torch.testing.assert_close(found, logits(load(rounded)), rtol=1e-5, atol=1e-5)
    assert 1e-3 < (found - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize("scheme", ["awq", "fp8-block", "packed-fp8-head"])
def test_random_weights_need_only_the_config(tmp_path: Path, scheme: str) -> None:
    quantized, _ = write_checkpoints(tmp_path, scheme)
    assert logits(load(quantized, load_format="dummy")).isfinite().all()


def test_random_weights_have_the_output_layer_that_the_config_says() -> None:
    packed = Quantization("packed")
    kinds: list[tuple[torch.dtype, tuple[int, ...]] | None] = []
    for output in (None, FP8_ROWS, packed):
        source = DummyMatrices(DummyCheckpoint(CPU, 0), dataclasses.replace(packed, output=output))
        head = source.read_matrix("lm_head.weight", (16, 256), CPU)
        kinds.append(None if head is None else (head.values.dtype, tuple(head.scales.shape)))
        layer = source.read_matrix("model.layers.0.mlp.up_proj.weight", (16, 256), CPU)
        assert layer is not None and layer.values.dtype == torch.uint8
    assert kinds == [None, (torch.float8_e4m3fn, (16, 1)), (torch.uint8, (16, 2))]


def ignore(scheme: str, *entries: str) -> dict[str, Any]:
    return SCHEMES[scheme] | {"ignore": list(entries)}


def aim(scheme: str, **targets: list[str]) -> dict[str, Any]:
    """Return a config whose groups have other targets."""
    config = copy.deepcopy(SCHEMES[scheme])
    for group, some in targets.items():
        config["config_groups"][group]["targets"] = some
    return config


@pytest.mark.parametrize(
    ("config", "output"),
    [
        (SCHEMES["fp8-channel"], None),
        (SCHEMES["fp8-head"], "fp8"),
        ({key: value for key, value in SCHEMES["fp8-head"].items() if key != "ignore"}, "fp8"),
        (ignore("fp8-head", "model.layers.0.mlp.gate"), "fp8"),
        (ignore("fp8-head", "re:.*head"), None),
        (ignore("fp8-head", "re:model.*", "language_model.lm_head"), None),
        (ignore("fp8-head", "re:(", "re:" + "(" * 5000, "re:x{9999999999}"), "fp8"),  # no patterns at all
        (aim("fp8-head", group_0=["re:.*_proj$"]), None),
        (aim("fp8-head", group_0=["re:.*_proj$", "lm_head"]), "fp8"),
        (SCHEMES["packed-head"], "packed"),
        (SCHEMES["packed-fp8-head"], "fp8"),
        (aim("packed-fp8-head", group_1=["re:.*down_proj$"]), "packed"),
        (aim("packed-fp8-head", group_0=["re:.*lm_head"], group_1=["Linear"]), "packed"),
        (ignore("packed-fp8-head", "lm_head"), None),
        (SCHEMES["gptq"], None),
        (SCHEMES["gptq-head"], "gptq"),
        (SCHEMES["awq"], None),
        (SCHEMES["fp8-block"], None),
        ({"quant_method": "mxfp4"}, None),
    ],
)
def test_a_config_says_how_the_output_layer_is_quantized(config: dict[str, Any], output: str | None) -> None:
    found = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert found is not None
    assert (None if found.output is None else found.output.storage) == output
    assert found.output is None or (found.output.output is None and found.output.has_groups == (output != "fp8"))


@pytest.mark.parametrize(
    ("scheme", "said"), [("packed-fp8-head", "packed"), ("gptq", "gptq-head"), ("gptq-head", "gptq")]
)
def test_of_the_output_layer_the_files_decide(tmp_path: Path, scheme: str, said: str) -> None:
    quantized, plain = write_checkpoints(tmp_path, scheme)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEMES[said]}))
    torch.testing.assert_close(logits(load(quantized)), logits(load(plain)), rtol=1e-5, atol=1e-5)


def change(scheme: str, **values: Any) -> dict[str, Any]:
    return SCHEMES[scheme] | values


def change_weights(scheme: str, **values: Any) -> dict[str, Any]:
    config = copy.deepcopy(SCHEMES[scheme])
    config["config_groups"]["group_0"]["weights"] |= values
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization by 'bitsandbytes' .*Blink runs fp8"),
        ({}, "'quant_method' is missing"),
        (change("awq", bits=8), "awq of 8 bits"),
        (change("awq", group_size=48), "a group_size of 48, not 32 or 64 or 128"),
        (change("awq", version="gemv"), "AWQ of the version 'gemv'"),
        (change("gptq", desc_act=True), "desc_act"),
        (change("gptq", group_size=-1), "a group_size of -1"),
        (change("fp8-block", weight_block_size=[64, 128]), r"FP8 in blocks of \[64, 128\]"),
        (change("fp8-block", fmt="e5m2"), "FP8 of the format 'e5m2'"),
        (change_weights("fp8-channel", strategy="group"), "FP8 by 'group'"),
        (change_weights("packed", group_size=16), "a group_size of 16"),
        (change_weights("packed", num_bits=8), "compressed-tensors with 'int' weights of 8 bits"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}, None), "'float' weights of 4 bits"),
        (change("packed", format="mixed-precision"), "compressed-tensors with 'int' weights of 4 bits .''"),
        (change("packed", format="mixed-precision", config_groups={}), "a mix other than FP8 per channel and 4 bits"),
        ([], "must be an object"),
    ],
)
def test_schemes_that_blink_does_not_run_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    quantized, _ = write_checkpoints(tmp_path, "fp8-channel")
    whole = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message) as caught:
        load(quantized)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("scheme", "name", "value", "message"),
    [
        ("fp8-channel", "mlp.down_proj.weight_scale", torch.ones(3, 1), r"has shape \(3, 1\)"),
        ("fp8-block", "mlp.down_proj.weight_scale_inv", torch.ones(256, 1), r"has shape \(256, 1\)"),
        ("fp8-channel", "mlp.down_proj.weight", torch.ones(256, 512, dtype=torch.int8), "has type torch.int8"),
        ("awq", "mlp.down_proj.qzeros", torch.ones(4, 31, dtype=torch.int32), r"has shape \(4, 31\)"),
        ("awq", "mlp.down_proj.qweight", torch.ones(512, 32), "has type torch.float32"),
        ("gptq", "mlp.down_proj.g_idx", torch.arange(512).flip(0) // 128, "reorders columns"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, scheme: str, name: str, value: Tensor, message: str
) -> None:
    quantized, _ = write_checkpoints(tmp_path, scheme)
    file = quantized / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.{name}": value}, file)
    with pytest.raises(ConfigError, match=message):
        load(quantized)


def test_an_fp8_tensor_without_scales_is_refused(tmp_path: Path) -> None:
    quantized, _ = write_checkpoints(tmp_path, "fp8-channel")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"up_proj.weight' has type torch.float8_e4m3fn"):
        load(quantized)


def test_matrices_of_4_bits_do_not_become_fp8(tmp_path: Path) -> None:
    quantized, _ = write_checkpoints(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* has matrices of 4 bits \(AWQ\) already"):
        load(quantized, quantization="fp8")
