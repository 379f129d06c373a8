# SPDX-License-Identifier: Apache-2.0
"""Latent attention on the CPU against each head's own keys and values, and what descriptions of it say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.base import plain
from blink.formats.fp8 import FP8
from blink.kernels import latent
from blink.kernels.cpu.latent import KERNELS
from blink.kernels.cpu.rotary import rotate
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LATENT_EPS, UNSCALED, KvScales, LatentSizes
from blink.models.layer_weights import MoeWeights
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.models.weights.loader import load_model
from latent_rows import BLOCK_SIZE, DECODE, MIXED, Rows, attend_expanded, draw_expansion, make_cells, make_latent_batch
from model_driver import Driver
from model_families import FAMILIES, SMALL, check, generate, make_prompts, save_model
from model_specs import attention_of

CASES = json.loads(Path(__file__).with_name("model_facts.json").read_text())
SIZES, NOPE, VALUE = LatentSizes(heads=4, rank=32, rope=8), 16, 24


@pytest.mark.parametrize("kv_scales", [None, KvScales(key=0.02)], ids=["float32", "fp8"])
@pytest.mark.parametrize("rows", [DECODE, MIXED, [(1, 1)], [(70, 70)]], ids=["decode", "mixed", "one", "prompt"])
def test_rows_of_all_lengths_attend_to_their_latents(rows: Rows, kv_scales: KvScales | None) -> None:
    """The cache holds large numbers where no row has a token; padding gives zeros."""
    torch.manual_seed(3)
    count, padding, scale = sum(number for number, _ in rows), 2, 0.3
    batch = make_latent_batch(rows, max_tokens=count + padding, max_rows=len(rows) + padding)
    expansion, scales = draw_expansion(SIZES, NOPE, VALUE), kv_scales or UNSCALED
    dtype = torch.float32 if kv_scales is None else FP8
    cells, held = make_cells(batch, rows, SIZES, dtype, scales)
    query = torch.randn(count + padding, SIZES.heads, NOPE + SIZES.rope)
    absorbed = torch.einsum("thn,hnr->thr", query[..., :NOPE], expansion.keys)
    cache = LayerCache(held.float().nan_to_num(100.0).to(dtype))
    sizes = len(query), len(rows) + padding
    plan = latent.plan_latent_attention(KERNELS, batch, *sizes, SIZES, cache, torch.float32)
    whole = torch.cat((absorbed, query[..., NOPE:]), dim=2)
    found = latent.expand(KERNELS, latent.latent_attention(whole, cache, plan, scale, scales), expansion)
    expected = attend_expanded(query[:count], batch, rows, cells, expansion, scale)
    torch.testing.assert_close(found[:count], expected, rtol=1e-4, atol=1e-4)
    assert not found[count:].any()


@pytest.mark.parametrize("kv_scales", [UNSCALED, KvScales(key=0.02)], ids=["float32", "fp8"])
def test_a_token_keeps_its_normalised_latent_and_its_rotated_key(kv_scales: KvScales) -> None:
    torch.manual_seed(4)
    is_fp8 = kv_scales is not UNSCALED
    cells = torch.zeros(1, 3, BLOCK_SIZE, 1, SIZES.rank + SIZES.rope).to(FP8 if is_fp8 else torch.float32)
    cache, expansion = LayerCache(cells), draw_expansion(SIZES, NOPE, VALUE)
    query, kept = torch.randn(3, SIZES.heads, NOPE + SIZES.rope), torch.randn(3, SIZES.rank + SIZES.rope)
    rotation, slots = torch.rand(3, SIZES.rope), torch.tensor([20, -1, 5], dtype=torch.int32)
    found = latent.absorb_and_store(KERNELS, query, kept, rotation, slots, cache, expansion, kv_scales)
    latents, keys = kept.split([SIZES.rank, SIZES.rope], dim=1)
    rate = torch.rsqrt(latents.square().mean(1, keepdim=True) + LATENT_EPS)
    wanted = torch.cat((latents * rate * expansion.norm, rotate(keys[:, None], rotation)[:, 0]), dim=1)
    held = cache.keys.float().view(-1, SIZES.rank + SIZES.rope) * kv_scales.key
    rtol, atol = (0.07, 1e-3) if is_fp8 else (1e-5, 1e-6)
    torch.testing.assert_close(held[[20, 5]], wanted[[0, 2]], rtol=rtol, atol=atol)
    assert int(held.any(1).sum()) == 2
    torch.testing.assert_close(found[..., SIZES.rank :], rotate(query[..., NOPE:], rotation), rtol=0, atol=0)


@pytest.mark.long
def test_prompts_at_once_give_the_tokens_of_transformers_though_some_are_preempted(tmp_path: Path) -> None:
    """26 blocks hold the longest sequence and little more. With a cache in FP8, test_kv_cache_fp8.py does it always."""
    model, prompts = save_model("deepseek_v3", tmp_path), make_prompts()
    check(model, prompts, generate(tmp_path, prompts, "cpu", num_gpu_blocks_override=26))


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_routers_of_scores_compute_in_float32_whatever_others_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **FAMILIES[name]}))
    config = ModelConfig(model=str(tmp_path), load_format="dummy")
    decoder = load_model(config, torch.device("cpu"), torch.bfloat16)
    driver = Driver(decoder)
    driver.add([5, 60, 17, 33, 80, 4], 3)
    driver.run(max_chunk=4)
    assert len(driver.sequences[0].tokens) == 9
    mlp = decoder.layers[1].mlp
    assert isinstance(mlp, MoeWeights) and mlp.choice_bias is not None
    assert (mlp.router.dtype, mlp.choice_bias.dtype, plain(mlp.down).dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )


def read(directory: Path, name: str, **changes: Any) -> ModelSpec:
    """Read a recorded description with some values changed; ...: left out."""
    values = {key: value for key, value in {**CASES[name]["config"], **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return read_config_json(directory)


def test_a_stretched_context_scales_the_scores(tmp_path: Path) -> None:
    """But not where only the rotation's own factor is asked for."""
    growth = (0.1 * math.log(40) + 1) ** 2
    stretched = attention_of(read(tmp_path, "deepseek-v3").layers[0])
    assert stretched.scale == pytest.approx(192**-0.5 * growth)
    assert stretched.rope.magnitude == 1
    yarn = {**CASES["deepseek-v3"]["config"]["rope_scaling"], "mscale_all_dim": 0}
    plain = attention_of(read(tmp_path, "deepseek-v3", rope_scaling=yarn).layers[0])
    assert plain.scale == pytest.approx(192**-0.5)
    assert attention_of(read(tmp_path, "glm-4.7-flash").layers[0]).scale == pytest.approx(256**-0.5)


def test_a_token_keeps_one_vector_for_all_heads(tmp_path: Path) -> None:
    layout = read(tmp_path, "kimi-k2").cache_layout
    assert layout.bytes_per_block(1, 2) == 61 * 2 * (512 + 64)


def test_the_first_layers_or_those_of_a_list_have_no_experts(tmp_path: Path) -> None:
    def find_dense(spec: ModelSpec) -> list[int]:
        return [index for index, layer in enumerate(spec.layers) if layer.mlp.mixture is None]

    assert find_dense(read(tmp_path, "deepseek-v3")) == [0, 1, 2]
    assert find_dense(read(tmp_path, "deepseek-v3", first_k_dense_replace=...)) == [0, 1, 2]
    assert find_dense(read(tmp_path, "deepseek-v2-lite", first_k_dense_replace=...)) == []
    kinds = ["sparse", "dense"] + ["sparse"] * 45
    assert find_dense(read(tmp_path, "glm-4.7-flash", mlp_layer_types=kinds)) == [1]
    ends = {"moe_layer_start_index": 2, "moe_layer_end_index": 25, "moe_layer_interval": 2}
    assert find_dense(read(tmp_path, "ernie-4.5-21b-a3b", **ends)) == [0, 1, *range(2, 26, 2), 26, 27]
    assert find_dense(read(tmp_path, "ernie-4.5-21b-a3b", moe_layer_end_index=-1)) == [0]


def test_defaults_are_those_of_the_families(tmp_path: Path) -> None:
    assert attention_of(read(tmp_path, "glm-4.5-air", partial_rotary_factor=...).layers[0]).rope.rotary_dim == 64
    assert attention_of(read(tmp_path, "minimax-m2").layers[0]).rope.rotary_dim == 64
    assert attention_of(read(tmp_path, "minimax-m2", rotary_dim=...).layers[0]).rope.rotary_dim == 128
    assert read(tmp_path, "deepseek-v3", qk_rope_head_dim=...) == read(tmp_path, "deepseek-v3")
    nested = {"model_type": "kimi_k25", "text_config": CASES["kimi-k2"]["config"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_config_json(tmp_path) == read(tmp_path, "kimi-k2")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("glm-4.7-flash", {"attention_bias": True}, "attention_bias"),
        ("glm-4.7-flash", {"rope_interleave": False}, "rotation of halves"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, "each layer must have a type"),
        ("glm-4.7-flash", {"mlp_layer_types": ["wide"] * 47}, "a layer of a type in"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "experts in every 2th layer"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("minimax-m2", {"use_qk_norm": False}, "without norms of queries and keys"),
        ("ernie-4.5-21b-a3b", {"use_bias": True}, "use_bias"),
        ("ernie-4.5-21b-a3b", {"moe_norm_min": 0.5}, "moe_norm_min of 0.5"),
    ],
)
def test_what_no_layer_does_is_refused(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, name, **changes)


def test_a_rotation_of_a_part_of_the_one_key_is_refused(tmp_path: Path) -> None:
    spec = read(tmp_path, "glm-4.7-flash", partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match="must have one head of keys, and rotate its own part"):
        spec.check("config.json")
