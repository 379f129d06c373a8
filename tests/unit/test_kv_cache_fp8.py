# SPDX-License-Identifier: Apache-2.0
"""--kv-cache-dtype fp8: what the cache holds, the scales of checkpoints, and that tokens do not depend on batching."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_kernels_attention import HEAD_DIM, NUM_BLOCKS, attend_naively, make_batch
from torch import Tensor

from blink.config import EngineConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.errors import ConfigError
from blink.formats.fp8 import FP8
from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import AttentionOptions, KvScales
from blink.kernels.rotary import rotate_and_store
from blink.models.decoder import Decoder
from blink.models.weights.kv_scales import read_kv_scales
from blink.models.weights.loader import load_model
from model_driver import Driver
from model_families import FAMILIES, Found, generate, make_prompts, save_model
from quantized_checkpoints import write_checkpoints
from tiny_model import BLOCK_BYTES, write_tiny_model

CPU = torch.device("cpu")
_SHORT = ("gpt_oss", "deepseek_v3")
NAMES = [name if name in _SHORT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]


def load(path: Path, kv_cache_dtype: str = "fp8") -> Decoder:
    return load_model(ModelConfig(model=str(path), kv_cache_dtype=kv_cache_dtype), CPU, torch.float32)


def test_the_cache_holds_keys_and_values_divided_by_their_scales_and_rounded() -> None:
    torch.manual_seed(1)
    num_tokens, kv_heads, scales = 5, 2, KvScales(0.5, 4.0)
    qkv = torch.randn(num_tokens, (4 + 2 * kv_heads) * HEAD_DIM)
    qkv[2] *= 1e4  # beyond FP8
    slots = torch.tensor([3, 17, -1, 30, 8], dtype=torch.int32)
    slots[2] = 9
    cache = torch.zeros(2, 4, 8, kv_heads, HEAD_DIM).to(FP8)
    wide = torch.zeros(2, 4, 8, kv_heads, HEAD_DIM)
    rotation = torch.rand(num_tokens, HEAD_DIM)
    rotate_and_store(qkv.clone(), rotation, slots, LayerCache(wide))
    rotate_and_store(qkv, rotation, slots, LayerCache(cache), None, scales)
    for found, exact, scale in zip(cache.float(), wide, (scales.key, scales.value), strict=True):
        expected = (exact / scale).clamp(-448, 448)
        assert torch.equal(found, expected.to(FP8).float())
    assert cache.float().abs().max() == 448


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(kv_scales=KvScales(0.5, 3.0)),
        AttentionOptions(scale=0.5, softcap=1e6, kv_scales=KvScales(0.5, 3.0)),
    ],
    ids=["plain", "cap"],
)
def test_attention_to_fp8_is_attention_to_what_it_stands_for(options: AttentionOptions) -> None:
    rows = [(1, 9), (1, 33), (5, 5), (16, 48)]
    torch.manual_seed(2)
    batch, num_tokens = make_batch(rows, 16)
    cells = torch.randn(2, NUM_BLOCKS, 16, 2, HEAD_DIM).to(FP8)
    meant = cells.float() * torch.tensor([options.kv_scales.key, options.kv_scales.value]).view(2, 1, 1, 1, 1)
    query = torch.randn(num_tokens, 4, HEAD_DIM)
    cache = LayerCache(cells)
    plan = plan_attention(batch, num_tokens, len(rows), [], cache, query.dtype)
    factor = 1.0 if options.scale is None else options.scale * math.sqrt(HEAD_DIM)
    expected = attend_naively(query * factor, meant, batch, rows)
    torch.testing.assert_close(paged_attention(query, cache, plan, options).double(), expected, rtol=1e-4, atol=1e-4)


# Gemma 4 does not divide scores by the root of a head's size, so that the rounding of keys moves them further.
_MOST_ERROR = {"gemma4-moe": 0.8}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_alone_and_in_chunks_of_many_with_preemption(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    prompts = make_prompts()
    # 26 blocks hold the longest sequence and little more.
    found = generate(tmp_path, prompts, "cpu", kv_cache_dtype="fp8", num_gpu_blocks_override=26)
    assert found.together == found.alone
    assert 0 < error(found, generate(tmp_path, prompts[1:6], "cpu")) < _MOST_ERROR.get(name, 0.4)


def error(found: Found, expected: Found) -> float:
    """Return how far logprobs of all but the first prompt are from those expected, in standard deviations of these."""
    pairs = list(zip(found.logprobs[1:], expected.logprobs, strict=False))
    ours, theirs = (torch.tensor([value for pair in pairs for value in pair[side]]) for side in (0, 1))
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


def save_scaled(folder: Path, changes: dict[str, Tensor], norm_factor: float = 1.0) -> Path:
    """Write a checkpoint with tensors of layers changed or added; keys times a factor, queries divided by it."""
    _, plain = write_checkpoints(folder, "fp8-channel")
    tensors = load_file(plain / "model.safetensors")
    for name, values in tensors.items():
        if "k_norm" in name or "q_norm" in name:
            values.mul_(norm_factor if "k_norm" in name else 1 / norm_factor)
    save_file(tensors | {f"model.layers.{name}": value for name, value in changes.items()}, plain / "model.safetensors")
    return plain


def test_scales_are_read_under_the_names_that_checkpoints_give_them(tmp_path: Path) -> None:
    scales = {
        "0.self_attn.k_scale": torch.tensor(0.5),
        "0.self_attn.attn.v_scale": torch.tensor([0.25]),
        "1.self_attn.kv_scale": torch.tensor([2.0], dtype=torch.bfloat16),
    }
    assert read_kv_scales(save_scaled(tmp_path, scales), 2) == [KvScales(0.5, 0.25), KvScales(2.0, 2.0)]


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(torch.nan), torch.ones(2)], ids=["0", "nan", "two"])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path, scale: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"1\.self_attn\.v_scale.*one positive number"):
        load(save_scaled(tmp_path, {"1.self_attn.v_scale": scale}))


def logits(decoder: Decoder) -> Tensor:
    driver = Driver(decoder)
    driver.add([5, 60, 17, 33, 80, 4, 9, 9, 71], 1)
    driver.add([99, 3], 1)
    return driver.compute_logits()


def test_scales_keep_keys_that_are_too_large_for_fp8(tmp_path: Path) -> None:
    scales = {f"{layer}.self_attn.k_scale": torch.tensor(16.0) for layer in (0, 1)}
    scaled = save_scaled(tmp_path / "a", scales, 2000.0)
    cut = save_scaled(tmp_path / "b", {}, 2000.0)
    expected = logits(load(scaled, kv_cache_dtype="auto"))
    assert (logits(load(scaled)) - expected).norm() < 0.05 * expected.norm()
    assert (logits(load(cut)) - expected).norm() > 0.1 * expected.norm()


def test_the_same_bytes_hold_twice_the_tokens_of_16_bits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, max_position_embeddings=64)

    def count_blocks(dtype: str) -> int:
        config = EngineConfig(
            model=ModelConfig(model=str(model), load_format="dummy", skip_tokenizer_init=True, kv_cache_dtype=dtype),
            region=f"kv-{os.getpid()}-{secrets.token_hex(3)}",
            kv_cache_memory_bytes=100 * BLOCK_BYTES,
            max_num_seqs=8,
        )
        engine = CpuEngine(config)
        engine.remove_region()
        assert sum(layer.cells.nbytes for layer in engine._kv_cache) == 100 * BLOCK_BYTES
        return engine._kv_cache[0].num_blocks

    assert (count_blocks("auto"), count_blocks("fp8")) == (100, 200)


def test_a_gpu_without_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = ModelConfig(model=str(write_tiny_model(tmp_path)), load_format="dummy", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        load_model(config, torch.device("cuda"), torch.bfloat16)


def test_a_type_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8 is not supported; use auto, fp8, fp8_e4m3"):
        load_model(ModelConfig(model=str(write_tiny_model(tmp_path)), kv_cache_dtype="int8"), CPU, torch.float32)
