# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 rule on the CPU against transformers' layer of Granite 4, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import mamba, recurrent
from blink.kernels.layer_cache import StateCache
from blink.kernels.mamba import MambaProjections, MambaWeights
from blink.kernels.recurrent import Rows

granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")

TOLERANCE = 2e-5
HIDDEN = 48


def make_layer(heads: int, groups: int, state_size: int, *, conv_bias: bool = True) -> Any:
    config = granite.GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mamba_n_heads=heads,
        mamba_n_groups=groups,
        mamba_d_state=state_size,
        mamba_conv_bias=conv_bias,
        mamba_chunk_size=16,
    )
    torch.manual_seed(3)
    layer = granite.GraniteMoeHybridMambaLayer(config, 0).float()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.uniform_(-1, 1) if name != "norm.weight" else parameter.uniform_(0.5, 1.5)
    return layer.eval()


def take_weights(layer: Any) -> MambaWeights:
    bias = layer.conv1d.bias
    return MambaWeights(
        layer.conv1d.weight.detach()[:, 0].T.contiguous(),
        None if bias is None else bias.detach(),
        -layer.A_log.detach().exp(),
        layer.dt_bias.detach(),
        layer.D.detach(),
        layer.norm.weight.detach(),
        layer.layer_norm_epsilon,
        layer.n_groups,
        layer.ssm_state_size,
    )


def project(layer: Any, hidden: Tensor) -> MambaProjections:
    z, channels, dt = layer.in_proj(hidden)[0].split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    return MambaProjections(channels, z, dt)


def make_cache(layer: Any) -> StateCache:
    shape = (3, layer.num_heads, layer.ssm_state_size, layer.head_dim)
    return StateCache(torch.full(shape, torch.nan), torch.full((3, 4, layer.conv_dim), torch.nan))


def make_rows(position: int, tokens: int) -> Rows:
    return Rows(torch.tensor([1]), torch.tensor([position]), torch.tensor([0, tokens]))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sizes", [(4, 1, 16), (6, 2, 8), (3, 3, 32)])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@torch.no_grad()
def test_a_prompt_equals_transformers(tokens: int, sizes: tuple[int, int, int], chunked: bool) -> None:
    layer = make_layer(*sizes, conv_bias=sizes[1] != 2)
    hidden = torch.randn(1, tokens, HIDDEN)
    rows, weights = make_rows(0, tokens), take_weights(layer)
    out = mamba.advance(project(layer, hidden), make_cache(layer), rows, weights, chunked=chunked)
    torch.testing.assert_close(layer.out_proj(out), layer(hidden)[0], atol=TOLERANCE * 10, rtol=TOLERANCE * 10)


@torch.no_grad()
def test_a_prompt_and_tokens_after_it_equal_a_longer_prompt_of_transformers() -> None:
    layer = make_layer(4, 2, 16)
    hidden, own, position = torch.randn(1, 75, HIDDEN), make_cache(layer), 0
    expected, found = layer(hidden)[0], list[Tensor]()
    for tokens in (1, 2, 66, 1, 1, 1, 1, 1, 1):
        part = hidden[:, position : position + tokens]
        found.append(mamba.advance(project(layer, part), own, make_rows(position, tokens), take_weights(layer)))
        position += tokens
    torch.testing.assert_close(layer.out_proj(torch.cat(found)), expected, atol=TOLERANCE * 10, rtol=TOLERANCE * 10)
    assert own.states[[0, 2]].isnan().all() and own.inputs[[0, 2]].isnan().all()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_chunks_equal_single_tokens_from_a_given_state(tokens: int) -> None:
    torch.manual_seed(tokens)
    reads, keys = torch.randn(2, tokens, 4, 16)
    operands = reads, keys, torch.randn(tokens, 4, 8), -torch.rand(tokens, 4), torch.randn(tokens, 4, 8)
    state = torch.randn(4, 16, 8)
    of_chunks = recurrent.apply_in_chunks(mamba.RULE, operands, state)
    of_tokens = recurrent.apply_token_by_token(mamba.RULE, operands, state)
    for found, expected in zip(of_chunks, of_tokens, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE * 5, rtol=TOLERANCE * 5)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_cut_anywhere_leaves_the_same_state(chunked: bool) -> None:
    torch.manual_seed(9)
    weights, x, whole = random_weights(), random_projections(100), random_cache()
    expected = mamba.advance(x, whole, make_rows(0, 100), weights)
    for cuts in ((1,), (2, 3), (63,), (64, 65), (5, 70, 98)):
        cache, found = random_cache(), list[Tensor]()
        for first, end in zip((0, *cuts), (*cuts, 100), strict=True):
            part, rows = x.take(slice(first, end)), make_rows(first, end - first)
            found.append(mamba.advance(part, cache, rows, weights, chunked=chunked))
        torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(cache.states[1], whole.states[1], atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(cache.inputs[1], whole.inputs[1])


def test_rows_of_padding_leave_all_slots_alone() -> None:
    torch.manual_seed(4)
    weights, x, cache, alone = random_weights(), random_projections(8), random_cache(), random_cache()
    rows = Rows(torch.tensor([-1, 0, -1]), torch.tensor([0, 0, 5]), torch.tensor([0, 3, 7, 8]))
    out = mamba.advance(x, cache, rows, weights)
    first = Rows(torch.tensor([0]), torch.tensor([0]), torch.tensor([0, 4]))
    assert torch.equal(out[3:7], mamba.advance(x.take(slice(3, 7)), alone, first, weights))
    assert not out[:3].any() and not out[7:].any()
    assert cache.states[1].isnan().all() and cache.inputs[1].isnan().all()


def random_weights() -> MambaWeights:
    """Four heads of 8 in two groups, with states of 16 numbers for each of a head's."""
    vectors = -torch.rand(4), torch.randn(4), torch.randn(4), torch.rand(32)
    return MambaWeights(torch.randn(4, 96), torch.randn(96), *vectors, 1e-6, 2, 16)


def random_projections(tokens: int) -> MambaProjections:
    return MambaProjections(*(torch.randn(tokens, width) for width in (96, 32, 4)))


def random_cache() -> StateCache:
    return StateCache(torch.full((2, 4, 16, 8), torch.nan), torch.full((2, 4, 96), torch.nan))
