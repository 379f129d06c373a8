# SPDX-License-Identifier: Apache-2.0
"""`blink quantize`: small random models in, directories out that load like any other, with outputs near the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from blink.cli import main as cli
from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.int4 import pack_columns
from blink.formats.matrix import QuantizedMatrix
from blink.formats.schemes import FP8_ROWS
from blink.models.decoder import Decoder
from blink.models.weights.checkpoint import GgufCheckpoint
from blink.models.weights.loader import load_model
from blink.quantize.calibration import CalibratedCheckpoint
from blink.quantize.config import QuantizeConfig
from blink.quantize.conversion import quantize
from blink.quantize.directory import describe_quantization
from blink.quantize.rounding import Int4Grid, round_nearest
from blink.runner.matmul import linear
from model_driver import Driver
from model_mutations import CONFIG, MXFP4_CONFIG
from quantized_checkpoints import write_checkpoints

CPU = torch.device("cpu")
VOCABULARY = 256
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
FEW: dict[str, Any] = {"num_calibration_tokens": 640}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a random model with a tokenizer of one token for each byte."""
    _, plain = write_checkpoints(folder, "fp8-channel", vocab_size=VOCABULARY, **changes)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(plain / "tokenizer.json"))
    (plain / "additional_chat_templates").mkdir(exist_ok=True)
    (plain / TOOL_TEMPLATE).write_text("{{ tools }}")
    return plain


def load(path: Path) -> Decoder:
    return load_model(ModelConfig(model=str(path)), CPU, torch.float32)


def logits(decoder: Decoder, tokenizer: Tokenizer) -> Tensor:
    driver = Driver(decoder)
    for text in ("In the beginning there was nothing, which exploded.", "The cat sat on", "It is a truth"):
        driver.add(tokenizer.encode(text).ids, 1)
    return driver.compute_logits()


@pytest.mark.parametrize(
    ("options", "changes", "bound"),
    [
        ({"format": "fp8"}, {}, 0.028),  # rounding to nearest: 0.034
        pytest.param({"format": "int4"}, {}, 0.22, marks=pytest.mark.long),  # 0.30
        ({"format": "int4"}, {"hidden_size": 192, "head_dim": 48}, 0.2),  # 0.26
        pytest.param({"format": "int4", "group_size": 32}, EXPERTS, 0.4, marks=pytest.mark.long),
        ({"format": "fp8"}, EXPERTS, 0.1),
        ({"format": "int4", "fp8_matrices": ("k_proj", "v_proj", "down_proj")}, {}, 0.17),
    ],
    ids=["fp8", "int4", "int4-64", "int4-32-experts", "fp8-experts", "int4-and-fp8"],
)
def test_a_model_is_written_rounded_and_loads_with_near_outputs(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], bound: float
) -> None:
    plain = write_model(tmp_path, **changes)
    found = quantize(str(plain), str(tmp_path / "found"), QuantizeConfig(**options, **FEW))
    decoder = load(found)
    quantization = decoder.spec.quantization
    assert quantization is not None and quantization.bits == (8 if options["format"] == "fp8" else 4)
    if options["format"] == "int4":
        assert quantization.group == (64 if "hidden_size" in changes else options.get("group_size", 128))
        assert quantization.weight_bytes == (0.53125 if quantization.group == 128 else 0.625)
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    exact, rounded = logits(load(plain), tokenizer), logits(decoder, tokenizer)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < bound
    stored = load_file(found / "model.safetensors")
    names = {name for name in stored if name.endswith("_proj.weight_scale")}
    assert len(names) == sum(name.endswith("_proj.weight") for name in load_file(plain / "model.safetensors"))
    for name in ("tokenizer.json", TOOL_TEMPLATE):
        assert (found / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.mlp.down_proj.weight", float("nan")),
        ("model.layers.1.self_attn.k_proj.weight", float("-inf")),
        ("model.norm.weight", float("inf")),
        ("model.embed_tokens.weight", float("nan")),
    ],
)
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_weight_that_is_no_finite_number_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, name: str, value: float, form: str
) -> None:
    plain = write_model(tmp_path)
    weights = load_file(plain / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, plain / "model.safetensors")
    with pytest.raises(ConfigError, match=f"'{name}' holds weights that are infinite or no numbers"):
        quantize(str(plain), str(tmp_path / "found"), QuantizeConfig(format=form, **FEW))
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize("name", ["merges.txt", "special_tokens_map.json", TOOL_TEMPLATE, "tokenizer.model"])
def test_a_link_out_of_the_models_directory_is_not_copied(tmp_path: Path, name: str) -> None:
    plain = write_model(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("a password")
    (plain / name).unlink(missing_ok=True)
    (plain / name).symlink_to(secret)
    with pytest.raises(ConfigError, match=f"{name} is a link out of the model's directory"):
        quantize(str(plain), str(tmp_path / "found"), QuantizeConfig(format="fp8", **FEW))
    assert not (tmp_path / "found").exists()


OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("form", "bound", "tied"),
    [
        pytest.param("fp8", 0.04, False, marks=pytest.mark.long),
        ("fp8", 0.04, True),
        pytest.param("int4", 0.22, False, marks=pytest.mark.long),
        pytest.param("int4", 0.22, True, marks=pytest.mark.long),
    ],
)
def test_the_output_layer_becomes_fp8_beside_the_embeddings(
    tmp_path: Path, form: str, bound: float, tied: bool
) -> None:
    plain = write_model(tmp_path, tie_word_embeddings=tied)
    before = load_file(plain / "model.safetensors")
    if tied:
        del before[OUTPUT]
        save_file(before, plain / "model.safetensors")
    head = before[EMBEDDING if tied else OUTPUT]
    found, without = (
        quantize(str(plain), str(tmp_path / name), QuantizeConfig(format=form, quantize_lm_head=flag, **FEW))
        for name, flag in (("found", True), ("without", False))
    )
    after = load_file(found / "model.safetensors")
    assert torch.equal(after[EMBEDDING], before[EMBEDDING])
    assert after[OUTPUT].dtype == torch.float8_e4m3fn
    stored = after[OUTPUT].float() * after["lm_head.weight_scale"]
    assert (stored - head).norm() / head.norm() < 0.04  # 0.033; each to the nearest: 0.024
    check_output_config(found, form)
    decoder = load(found)
    assert not decoder.spec.tie_embeddings and decoder.spec.output_quantization == FP8_ROWS
    torch.testing.assert_close(linear(torch.eye(head.shape[1]), decoder.lm_head).T, stored)
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    exact, others, rounded = (logits(load(path), tokenizer) for path in (plain, without, found))
    assert 1e-3 < (rounded - others).norm() / others.norm() < 0.022  # rounding to nearest: 0.0235
    assert (rounded - exact).norm() / exact.norm() < bound


def check_output_config(found: Path, form: str) -> None:
    config = json.loads((found / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    quantization = config["quantization_config"]
    assert quantization["ignore"] == []
    groups = list(quantization["config_groups"].values())
    assert quantization["format"] == ("float-quantized" if form == "fp8" else "mixed-precision")
    assert [group["targets"] for group in groups] == [["Linear"], ["re:.*lm_head$"]][: 1 if form == "fp8" else 2]
    weights = groups[-1]["weights"]
    assert (weights["type"], weights["num_bits"], weights["strategy"]) == ("float", 8, "channel")


def test_matrices_in_fp8_and_the_output_layer_share_a_group() -> None:
    config = QuantizeConfig(format="int4", fp8_matrices=("down_proj",), quantize_lm_head=True)
    found = describe_quantization(config, 128, ["model.layers.0.mlp.gate"])
    assert [*found["config_groups"]] == ["group_0", "group_1"]
    assert found["config_groups"]["group_1"]["targets"] == ["re:.*down_proj$", "re:.*lm_head$"]
    assert found["ignore"] == ["model.layers.0.mlp.gate"]


@pytest.mark.long
def test_a_tuned_model_loads_with_codes_and_norms_of_its_own(tmp_path: Path) -> None:
    plain = write_model(tmp_path)
    options: dict[str, Any] = {"format": "int4", "fp8_matrices": ("down_proj",), "quantize_lm_head": True, **FEW}
    stored: list[dict[str, Tensor]] = []
    for steps in (0, 12):
        found = quantize(str(plain), str(tmp_path / f"found-{steps}"), QuantizeConfig(**options, tune=steps))
        stored.append(load_file(found / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    exact, tuned = logits(load(plain), tokenizer), logits(load(found), tokenizer)
    assert 1e-4 < (tuned - exact).norm() / exact.norm() < 0.22
    before, after = stored
    assert after[OUTPUT].dtype == torch.float8_e4m3fn
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(before.items())] == [
        (name, tensor.dtype, tensor.shape) for name, tensor in sorted(after.items())
    ]
    changed = {name.rsplit(".", 2)[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed >= {"q_proj", "o_proj", "up_proj"} and not changed & {"down_proj", "embed_tokens", "lm_head"}


def test_what_is_not_rounded_is_copied_as_it_is(tmp_path: Path) -> None:
    plain = write_model(tmp_path, hidden_size=128, head_dim=32, **EXPERTS)
    found = quantize(str(plain), str(tmp_path / "found"), QuantizeConfig(**FEW))
    before, after = load_file(plain / "model.safetensors"), load_file(found / "model.safetensors")
    same = [name for name in before if not name.endswith("_proj.weight")]
    assert len(same) > 10
    assert all(torch.equal(before[name], after[name]) for name in same)
    config = json.loads((found / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((plain / "config.json").read_text())
    assert quantization["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert quantization["config_groups"]["group_0"]["weights"]["strategy"] == "channel"


def test_words_of_4_bits_begin_with_the_lowest() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 1)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in pack_columns(codes)[2].tolist()] == ["76543210", "fedcba98"]


class OneMatrix:
    """A checkpoint of one matrix."""

    norm_shift = 0.0
    keeps_groups = True
    stored_rows: GgufCheckpoint | None = None
    matrices = None

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def check(self, name: str, shape: object) -> None:
        pass

    def fill(self, name: str, target: Tensor) -> None:
        del name
        target.copy_(self._weight)

    def read_quantized(self, names: object, order: object = None) -> None:
        pass


def test_experts_that_no_token_reaches_are_rounded_to_the_nearest() -> None:
    kept: dict[str, QuantizedMatrix] = {}
    weight, grid = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)), Int4Grid(64)
    checkpoint = CalibratedCheckpoint(OneMatrix(weight), lambda _: grid, kept.__setitem__, torch.zeros(1, 8))
    checkpoint.check("experts.0.up_proj.weight", (8, 64))
    assert checkpoint.read_quantized(["experts.0.up_proj.weight"]) is not None
    checkpoint.round_rest()
    assert torch.equal(kept["experts.0.up_proj.weight"].values, round_nearest(weight, grid).values)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def write_plain_gpt_oss(folder: Path) -> Path:
    """Write the description of a gpt-oss whose experts are not in MXFP4."""
    folder.mkdir()
    write(folder / "config.json", json.dumps({**CONFIG, **MXFP4_CONFIG, "quantization_config": None}))
    return folder


def test_what_cannot_be_quantized_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    plain = write_model(tmp_path)
    quantized, _ = write_checkpoints(tmp_path / "other", "awq")
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "file", "")
    short, odd = write(tmp_path / "short.txt", "Too short."), tmp_path / "odd.txt"
    odd.write_bytes(b"\xff\xfe" * 500)
    new = str(tmp_path / "new")
    cases: list[tuple[Path, str, dict[str, Any], str]] = [
        (quantized, new, {}, r"has matrices of 4 bits \(AWQ\) already"),
        (
            write_plain_gpt_oss(tmp_path / "joined"),
            new,
            {},
            r"share a tensor \(gpt_oss\) are not quantized",
        ),
        (plain, str(tmp_path / "full"), {}, "is not empty"),
        (plain, str(tmp_path / "full" / "file"), {}, "cannot be created"),
        (plain, new, {"calibration": short}, "give a text of 128 or more"),
        (plain, new, {"calibration": str(odd)}, "cannot read"),
        (plain, new, {"calibration": str(tmp_path / "none.txt")}, "is missing"),
        (plain, new, {"group_size": 64}, "--group-size is for --format int4"),
        (plain, new, {"format": "int4", "fp8_matrices": ("q_prj",)}, "--fp8-matrix q_prj is the end of no"),
        (write_model(tmp_path / "experts", **EXPERTS), new, {"format": "int4", "tune": 1}, "--tune is for models like"),
        (plain, new, {"format": "int4", "tune": 1, "fp8_matrices": ("proj",)}, "--tune needs matrices of 4 bits"),
        (write_model(tmp_path / "odd", hidden_size=240, head_dim=60), new, {"format": "int4"}, "no whole groups of 32"),
    ]
    for model, output, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            quantize(str(model), output, QuantizeConfig(**options))
    assert not list((tmp_path / "new").glob("*"))
    with pytest.raises(ConfigError, match="--fp8-matrix is for --format int4"):
        QuantizeConfig(fp8_matrices=("q_proj",))
    with pytest.raises(ConfigError, match="--tune is for --format int4"):
        QuantizeConfig(tune=1)
    with pytest.raises(ConfigError, match="--num-calibration-tokens must be"):
        QuantizeConfig(num_calibration_tokens=1)


def test_the_command_ends_with_status_2_where_there_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quantize", "--help"])
    assert "usage: blink quantize MODEL OUTPUT" in capsys.readouterr().out
    assert cli.main(["quantize", str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
