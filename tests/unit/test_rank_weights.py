# SPDX-License-Identifier: Apache-2.0
"""What each rank loads: its parts of every format's tensors, each of which is read once for all ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.weights.checkpoint import SafetensorsCheckpoint
from blink.models.weights.cuts import Cuts
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from gguf_conversion import convert
from model_driver import Driver
from model_families import make_prompts, save_model
from quantized_checkpoints import write_checkpoints
from rank_models import CPU, drive_ranks, load_parts, run_to_end
from tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(200)

Kind = gguf.GGMLQuantizationType
PROMPTS = make_prompts()[3:6]
_FAST = ("fp8-block", "awq-64", "packed-head")
SCHEMES = ["fp8-channel", "fp8-tensor", "fp8-block", "awq", "gptq", "packed", "awq-64", "gptq-32", "packed-head"]
_SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
_TWELVE_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96, "intermediate_size": 96}


def mark(names: list[str], fast: tuple[str, ...]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.long) for name in names]


def check_ranks(path: Path, size: int) -> None:
    """Compare what ranks sample with what one does."""
    whole = load_model(ModelConfig(model=str(path)), CPU, torch.float32)
    expected = run_to_end(Driver(whole), PROMPTS)
    driver, followers = drive_ranks(path, size)
    found = run_to_end(driver, PROMPTS)
    followers.end()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    torch.testing.assert_close([one for _, one in found], [one for _, one in expected], rtol=1e-3, atol=1e-3)


def test_the_bias_of_a_sum_is_the_first_ranks_alone(tmp_path: Path) -> None:
    spec = read_spec(write_tiny_model(tmp_path, attention_bias=True))
    bias = torch.arange(1.0, spec.hidden_size + 1)
    name = "model.layers.0.self_attn.o_proj.bias"
    first, second = (Cuts(spec, one.shard, 1).find(name).take(bias) for one in spec.split(2, 1))
    assert torch.equal(first, bias) and not second.any()


@pytest.mark.parametrize("scheme", mark(SCHEMES, _FAST))
def test_matrices_of_a_quantized_checkpoint_are_cut(scheme: str, tmp_path: Path) -> None:
    path, _ = write_checkpoints(tmp_path, scheme)
    check_ranks(path, 2)


@pytest.mark.parametrize("kinds", [(Kind.Q8_0, Kind.Q4_0), pytest.param((Kind.Q4_1, Kind.F16), marks=pytest.mark.long)])
def test_blocks_of_a_gguf_file_stay_as_they_are(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    _, plain = write_checkpoints(tmp_path, "awq")
    convert(plain, tmp_path / "model.gguf", gguf.MODEL_ARCH.QWEN3, read_spec(plain), kinds)
    check_ranks(tmp_path / "model.gguf", 2)
    whole = load_model(ModelConfig(model=str(tmp_path / "model.gguf")), CPU, torch.float32)
    layers = [part.layers[0] for part in load_parts(tmp_path / "model.gguf", 2)]
    assert sum(layer.output.nbytes for layer in layers) == whole.layers[0].output.nbytes
    assert sum(layer.qkv.nbytes for layer in layers) == whole.layers[0].qkv.nbytes


def test_a_gguf_block_is_not_parted(tmp_path: Path) -> None:
    _, plain = write_checkpoints(tmp_path, "awq")
    convert(plain, tmp_path / "model.gguf", gguf.MODEL_ARCH.QWEN3, read_spec(plain), (Kind.Q4_K, Kind.Q6_K))
    with pytest.raises(ConfigError, match=r"size 2 does not divide .*256 columns in blocks of 256.*that fit: 1$"):
        load_parts(tmp_path / "model.gguf", 2)


@pytest.mark.parametrize("name", ["minimax_m2", "gpt_oss"])
def test_experts_are_dealt_whole_where_blocks_forbid_parts(name: str, tmp_path: Path) -> None:
    """As Qwen3-235B in FP8 on eight ranks: 1536 columns of an expert are 12 blocks of 128."""
    save_model(name, tmp_path)
    spec = read_spec(tmp_path)
    mixture = spec.mixture
    assert mixture is not None
    assert spec.split(2)[1].mixture == mixture.split(2, 1) and mixture.split(2, 1).size == mixture.size // 2
    dealt = mixture.split(2, 64)
    assert (dealt.size, dealt.held, dealt.experts) == (mixture.size, mixture.experts // 2, mixture.experts)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_ranks_with_whole_experts_give_the_tokens_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(name, tmp_path)
    monkeypatch.setattr("blink.models.weights.rank_matrices._count_block", lambda *_: 32)  # half of an expert's is none
    parts = load_parts(tmp_path, 2)
    mlps = [part.layers[0].mlp for part in parts]
    assert [(mlp.first, mlp.gate_up.shape[0]) for mlp in mlps] == [(0, 4), (4, 4)] if name == "qwen3_moe" else True  # pyright: ignore[reportAttributeAccessIssue]
    check_ranks(tmp_path, 2)


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3_next", "gpt_oss"])
def test_each_tensor_is_read_once_for_all_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(name, tmp_path)
    reads, read = Counter[str](), SafetensorsCheckpoint.read

    def count(self: SafetensorsCheckpoint, name: str, *others: Any) -> torch.Tensor:
        reads[name] += 1
        return read(self, name, *others)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", count)
    load_model(ModelConfig(model=str(tmp_path)), CPU, torch.float32)
    alone = dict(reads)
    reads.clear()
    load_parts(tmp_path, 2)
    assert dict(reads) == alone and set(alone.values()) == {1}


@pytest.mark.parametrize("name", ["llama-biased", "qwen3_5_moe", "granite4-hybrid", "deepseek_v3", "gemma4-moe"])
def test_a_rank_holds_its_part_alone(name: str, tmp_path: Path) -> None:
    """All that is cut is held once; what every rank has whole is small."""
    save_model(name, tmp_path)
    whole = load_model(ModelConfig(model=str(tmp_path)), CPU, torch.float32)
    parts = load_parts(tmp_path, 2)
    for part in parts:
        assert part.spec.num_parameters < 0.62 * whole.spec.num_parameters
        assert part.num_weight_bytes < 0.62 * whole.num_weight_bytes
        layout, own = whole.spec.cache_layout, part.spec.cache_layout
        is_latent = any(attention.latent for attention in whole.attentions)
        assert own.bytes_per_block(16, 4) <= layout.bytes_per_block(16, 4) * (1 if is_latent else 0.76)
        assert own.bytes_per_sequence(4) <= 0.6 * layout.bytes_per_sequence(4)


def test_random_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, vocab_size=99))  # of which one rank has 50, the other 49
    whole = load_model(ModelConfig(model=path, load_format="dummy"), CPU, torch.float32)
    parts = load_parts(Path(path), 2, load_format="dummy")
    assert [len(part.embedding) for part in parts] == [50, 49]  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(torch.cat([part.embedding for part in parts]), whole.embedding, rtol=0, atol=0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({**_SIX_HEADS, "intermediate_size": 64}, 4, r"6 query heads or 6 key-value heads; sizes that fit: 1, 2$"),
        ({**_SIX_HEADS, "intermediate_size": 65}, 2, r"an MLP's width of 65; sizes that fit: 1$"),
        (_TWELVE_HEADS, 6, r"4 key-value heads; sizes that fit: 1, 2, 4, 12$"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(
    changes: dict[str, int], size: int, told: str, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size} does not divide the model's .*{told}"):
        load_parts(path, size, load_format="dummy")


def test_a_block_of_scales_is_not_parted(tmp_path: Path) -> None:
    path, _ = write_checkpoints(tmp_path, "fp8-block")
    with pytest.raises(ConfigError, match=r"size 4 does not divide .*256 columns in blocks of 128.*that fit: 1, 2$"):
        load_parts(path, 4)


def test_a_damaged_checkpoint_is_refused_by_all_ranks(tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"has no tensor 'model.layers.3"):
        load_parts(tmp_path, 2)


def test_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = write_checkpoints(tmp_path, "awq")
    convert(plain, tmp_path / "model.gguf", gguf.MODEL_ARCH.QWEN3, read_spec(plain), (Kind.Q8_0,))
    reads, read = Counter[str](), GgufFile.read_rows

    def count(self: GgufFile, name: str, index: int | None = None) -> Any:
        reads[name] += 1
        return read(self, name, index)

    monkeypatch.setattr(GgufFile, "read_rows", count)
    load_parts(tmp_path / "model.gguf", 2)
    assert set(reads.values()) == {1}
