# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on the CPU against transformers' layer of Qwen3-Next, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from blink.config import ModelConfig
from blink.kernels.cpu import delta_rule, recurrent
from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import Rows
from blink.models.weights.loader import load_model
from model_families import FAMILIES, SMALL

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

TOLERANCE = 2e-5
OF_OUTPUTS = 5e-4  # the norm magnifies what chunks of 64 lose at strong decay


def make_layer(k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> Any:
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=48,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=k_heads,
        linear_num_value_heads=v_heads,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=v_dim,
    )
    torch.manual_seed(3)
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0).float()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.uniform_(-1, 1) if name != "norm.weight" else parameter.uniform_(0.5, 1.5)
    return layer.eval()


def take_weights(layer: Any) -> Any:
    return DeltaWeights(
        layer.conv1d.weight.detach()[:, 0].T.contiguous(),
        -layer.A_log.detach().exp(),
        layer.dt_bias.detach(),
        layer.norm.weight.detach(),
        layer.layer_norm_epsilon,
        layer.num_k_heads,
        layer.head_k_dim,
    )


def project(layer: Any, hidden: Tensor) -> Any:
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    parts = (torch.cat([part.flatten(2) for part in (q, k, v)], 2), z.flatten(2), b, a)
    return Projections(*(part[0] for part in parts))


def make_cache(layer: Any) -> Any:
    shape = (3, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return StateCache(torch.full(shape, torch.nan), torch.full((3, 4, layer.conv_dim), torch.nan))


def make_rows(position: int, tokens: int) -> Any:
    return Rows(torch.tensor([1]), torch.tensor([position]), torch.tensor([0, tokens]))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("heads", [(2, 4, 16, 16), (1, 3, 16, 8), (2, 2, 8, 32)])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 200])
@torch.no_grad()
def test_a_prompt_equals_transformers(tokens: int, heads: tuple[int, int, int, int], chunked: bool) -> None:
    layer = make_layer(*heads)
    hidden = torch.randn(1, tokens, 48)
    out = delta_rule.advance(
        project(layer, hidden), make_cache(layer), make_rows(0, tokens), take_weights(layer), chunked=chunked
    )
    torch.testing.assert_close(layer.out_proj(out), layer(hidden)[0], atol=OF_OUTPUTS, rtol=OF_OUTPUTS)


@torch.no_grad()
def test_short_queries_and_keys_equal_transformers() -> None:
    """So short that what is added to their squared length decides."""
    layer = make_layer(2, 4, 16, 16)
    layer.conv1d.weight.mul_(1e-4)
    hidden = torch.randn(1, 40, 48)
    out = delta_rule.advance(project(layer, hidden), make_cache(layer), make_rows(0, 40), take_weights(layer))
    torch.testing.assert_close(layer.out_proj(out), layer(hidden)[0], atol=OF_OUTPUTS, rtol=OF_OUTPUTS)


@torch.no_grad()
def test_a_prompt_and_tokens_after_it_equal_transformers_cached() -> None:
    layer = make_layer(2, 4, 16, 16)
    cache = qwen3_next.DynamicCache(
        config=qwen3_next.Qwen3NextConfig(layer_types=["linear_attention"], num_hidden_layers=1)
    )
    hidden = torch.randn(1, 75, 48)
    own, position = make_cache(layer), 0
    for tokens in (70, 1, 1, 1, 1, 1):
        part = hidden[:, position : position + tokens]
        expected = layer(part, cache=cache)[0]
        out = delta_rule.advance(
            project(layer, part), own, make_rows(position, tokens), take_weights(layer), chunked=tokens > 1
        )
        torch.testing.assert_close(layer.out_proj(out), expected, atol=OF_OUTPUTS, rtol=OF_OUTPUTS)
        position += tokens
    torch.testing.assert_close(own.states[1], cache.layers[0].recurrent_states[0][0], atol=TOLERANCE, rtol=TOLERANCE)
    assert own.states[[0, 2]].isnan().all() and own.inputs[[0, 2]].isnan().all()


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_both_rules_equal_those_of_transformers_from_a_given_state(tokens: int, name: str) -> None:
    torch.manual_seed(tokens)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, 4, 16), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(tokens, 4, 8), -torch.rand(tokens, 4), torch.rand(tokens, 4)
    state = torch.randn(4, 16, 8)
    theirs = getattr(qwen3_next, name)(
        *(part[None] for part in (q, k, v)), g[None], beta[None], initial_state=state[None], output_final_state=True
    )
    for apply in (recurrent.apply_in_chunks, recurrent.apply_token_by_token):
        for found, expected in zip(apply(delta_rule.RULE, (q / 4, k, v, g, beta), state), theirs, strict=True):
            torch.testing.assert_close(found, expected[0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_cut_anywhere_leaves_the_same_state(chunked: bool) -> None:
    torch.manual_seed(9)
    weights, x = random_weights(), random_projections(100)
    whole = random_cache()
    expected = delta_rule.advance(x, whole, make_rows(0, 100), weights)
    for cuts in ((1,), (2, 3), (63,), (64, 65), (5, 70, 98)):
        cache, found = random_cache(), []
        for first, end in zip((0, *cuts), (*cuts, 100), strict=True):
            found.append(
                delta_rule.advance(
                    x.take(slice(first, end)), cache, make_rows(first, end - first), weights, chunked=chunked
                )
            )
        torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(cache.states[1], whole.states[1], atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(cache.inputs[1], whole.inputs[1])


def test_rows_of_padding_leave_all_slots_alone() -> None:
    torch.manual_seed(4)
    weights, x, cache, alone = random_weights(), random_projections(8), random_cache(), random_cache()
    rows = Rows(torch.tensor([-1, 0, -1]), torch.tensor([0, 0, 5]), torch.tensor([0, 3, 7, 8]))
    out = delta_rule.advance(x, cache, rows, weights)
    first = Rows(torch.tensor([0]), torch.tensor([0]), torch.tensor([0, 4]))
    assert torch.equal(out[3:7], delta_rule.advance(x.take(slice(3, 7)), alone, first, weights))
    assert not out[:3].any() and not out[7:].any()
    assert cache.states[1].isnan().all() and cache.inputs[1].isnan().all()


def test_a_state_has_32_bits_whatever_the_weights_have(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**SMALL, **FAMILIES["qwen3_5"]}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(ModelConfig(model=str(tmp_path), load_format="dummy"), torch.device("cpu"), torch.bfloat16)
    cache = model.allocate_kv_cache(2, 16)
    assert {states.states.dtype for states in cache.recurrent.values()} == {torch.float32}
    assert {states.inputs.dtype for states in cache.recurrent.values()} == {torch.bfloat16}


def random_weights() -> Any:
    return DeltaWeights(torch.randn(4, 96), -torch.rand(4), torch.randn(4), torch.rand(8), 1e-6, 2, 16)


def random_projections(tokens: int) -> Any:
    return Projections(*(torch.randn(tokens, width) for width in (96, 32, 4, 4)))


def random_cache() -> Any:
    return StateCache(torch.full((2, 4, 16, 8), torch.nan), torch.full((2, 4, 96), torch.nan))
