# SPDX-License-Identifier: Apache-2.0
"""Rotation against transformers' and against complex multiplication; the KV write against a table of slots."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blink.kernels.cpu.rotary import rotate_and_store_native, rotate_and_store_torch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import HeadNorm
from blink.kernels.rotary import make_rotary_table, rotate_and_store
from blink.models.rope import LinearScaling, Llama3Scaling, Rope

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 8


def run(rotary_dim: int, kv_slots: list[int], head_norm: HeadNorm | None = None) -> tuple[torch.Tensor, ...]:
    """Rotate random heads at positions 3, 6, 9 ...; return qkv by head, queries, cache by slot and the angles."""
    torch.manual_seed(8)
    num_tokens = len(kv_slots)
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    heads = qkv.clone().view(num_tokens, -1, HEAD_DIM)
    frequencies = Rope(theta=100.0, rotary_dim=rotary_dim).frequencies()
    positions = 3 + 3 * torch.arange(num_tokens)
    rotation = make_rotary_table(frequencies, 64, "cpu")[positions]
    kv_cache = torch.zeros(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    query = rotate_and_store(qkv, rotation, torch.tensor(kv_slots, dtype=torch.int32), LayerCache(kv_cache), head_norm)
    return heads, query, kv_cache.flatten(1, 2), positions[:, None].double() * torch.tensor(frequencies).double()


def rotate_complex(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate by complex multiplication in float64: component i pairs with i + rotary_dim / 2."""
    half = angles.shape[1]
    turned = torch.complex(heads[..., :half].double(), heads[..., half : 2 * half].double())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag, heads[..., 2 * half :].double()), dim=-1)


@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_rotation_is_complex_multiplication_and_leaves_the_rest_of_each_head(rotary_dim: int) -> None:
    kv_slots = [5, 31, 0]
    heads, query, slots, angles = run(rotary_dim, kv_slots)
    rotated = rotate_complex(heads[:, :-KV_HEADS], angles)
    torch.testing.assert_close(query.double(), rotated[:, :HEADS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slots[0, kv_slots].double(), rotated[:, HEADS:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slots[1, kv_slots], heads[:, -KV_HEADS:])


@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_the_one_pass_version_agrees_with_pytorch(rotary_dim: int) -> None:
    torch.manual_seed(10)
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rotation = make_rotary_table(Rope(theta=100.0, rotary_dim=rotary_dim).frequencies(), 64, "cpu")[[9, 0, 63, 1, 2]]
    kv_slots = torch.tensor([3, -1, 31, 0, 17], dtype=torch.int32)
    caches = [torch.zeros(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    expected = rotate_and_store_torch(qkv.clone(), rotation, kv_slots, LayerCache(caches[0]))
    found = rotate_and_store_native(qkv, rotation, kv_slots, LayerCache(caches[1]))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-6, atol=1e-6)


def test_the_one_pass_version_rounds_to_float16_as_pytorch_does() -> None:
    """Values from below the least half to beyond the largest, in heads that are no multiple of 16 together."""
    torch.manual_seed(11)
    heads, head_dim = 1, 20
    qkv = torch.randn(400, 3 * heads * head_dim) * torch.logspace(-10, 7, 400)[:, None]
    qkv[0] = torch.tensor([65504.0, 65519.9, 65520.0, -1e30, 6e-8, -2.9e-8, 0.0, -0.0, 6.1035e-5, 2**-14]).repeat(6)
    rotation = torch.zeros(400, head_dim)
    rotation[:, : head_dim // 2] = 1  # turns nothing, so that both round the same numbers
    slots = torch.arange(400, dtype=torch.int32)
    caches = [LayerCache(torch.zeros(2, 25, 16, heads, head_dim).half()) for _ in range(2)]
    rotate_and_store_torch(qkv.clone(), rotation, slots, caches[0])
    rotate_and_store_native(qkv, rotation, slots, caches[1])
    assert torch.equal(caches[1].cells, caches[0].cells)
    assert caches[1].cells.abs().max() == 65504


def test_only_the_slots_of_real_tokens_are_written() -> None:
    _, _, slots, _ = run(16, [7, -1, 2, -1])
    written = slots.abs().sum(dim=(0, 2, 3)).nonzero()[:, 0].tolist()
    assert written == [2, 7]


def test_heads_are_normalised_before_rotation_when_the_model_asks() -> None:
    torch.manual_seed(9)
    norm = HeadNorm(torch.rand(HEAD_DIM) + 0.5, torch.rand(HEAD_DIM) + 0.5, 1e-6)
    heads, query, slots, angles = run(16, [1, 2, 3], norm)
    wide = heads.double()
    unit = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected_query = rotate_complex(unit[:, :HEADS] * norm.query_weight, angles)
    expected_key = rotate_complex(unit[:, HEADS:-KV_HEADS] * norm.key_weight, angles)
    torch.testing.assert_close(query.double(), expected_query, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slots[0, 1:4].double(), expected_key, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slots[1, 1:4], heads[:, -KV_HEADS:])


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(theta=5e5, rotary_dim=64), {"rope_type": "default", "rope_theta": 5e5}),
        (
            Rope(theta=1e4, rotary_dim=64, scaling=LinearScaling(factor=4.0)),
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        (
            Rope(
                theta=5e5,
                rotary_dim=64,
                scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
            ),
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_frequencies_equal_those_of_transformers(rope: Rope, parameters: dict[str, float]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=131072)
    config.rope_parameters = parameters
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(torch.tensor(rope.frequencies()), expected, rtol=1e-5, atol=0)


def test_divisors_of_a_gguf_file_scale_each_frequency() -> None:
    plain = Rope(theta=1e4, rotary_dim=8).frequencies()
    divided = Rope(theta=1e4, rotary_dim=8, divisors=(1.0, 2.0, 4.0, 8.0)).frequencies()
    assert divided == [plain[0], plain[1] / 2, plain[2] / 4, plain[3] / 8]
