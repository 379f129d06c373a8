# SPDX-License-Identifier: Apache-2.0
"""When prompts of latent attention have keys and values made of latents, and what such a step calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

import launch_traces
from blink.kernels.batch import Batch
from blink.kernels.cpu import latent as cpu_latent
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.device import supposing
from blink.kernels.gpu.latent import expanded
from blink.kernels.latent import (
    MixLatents,
    absorb_and_store,
    expand,
    latent_attention,
    plan_latent_attention,
)
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import ExpandedSizes, Expansion, KvScales, LatentSizes
from blink.models.weights.source import read_spec
from blink.plan.execution_plan import Choice
from blink.plan.site import Bucket
from blink.runner.devices import code_of
from blink.runner.gpu_device import LATENT_ATTENTION, GpuDevice
from blink.runner.planner import plan_step
from blink.runner.run import Runner
from blink.runner.sites import expected_sites
from launch_trace import pretended_gpu
from model_families import generate, make_prompts, save_model

_CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
FLASH = ExpandedSizes(LatentSizes(20, 512, 64), 192, 256)
PROMPTS = Bucket(2048, 256, decoding=False)


def choose(bucket: Bucket) -> Choice:
    """Return how a layer of GLM-4.7-Flash attends on an H100."""
    with supposing("h100"):
        model = expected_sites(read_spec(_CONFIGS / "glm-4.7-flash"), 16)
        return plan_step(GpuDevice(), model, bucket).layers[1].attend


def test_decode_steps_are_not_offered_expanded_prompts() -> None:
    found = choose(Bucket(32, 32, decoding=True))
    assert found.kernel == LATENT_ATTENTION
    assert found.refused == ()


@pytest.mark.parametrize(
    ("tokens", "rows", "reason"),
    [(2048, 256, None), (1024, 256, None), (1008, 256, "fewer than 1024 tokens"), (1024, 1024, "no prompts")],
)
def test_steps_of_many_tokens_expand_prompts(tokens: int, rows: int, reason: str | None) -> None:
    found = choose(Bucket(tokens, rows, decoding=False))
    assert (found.kernel == expanded.EXPANDED) == (reason is None)
    if reason is None:
        others = "others: 64 x 64; prompts: 64 x 64 by warpgroups (by rule)"
        assert found.config == f"from 399 queries of a row on 128 x 64; {others}"
    else:
        assert found.refused == (f"{expanded.EXPANDED} ({reason})",)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (FLASH._replace(nope=272), "heads of 272 and 256"),
        (FLASH._replace(latents=LatentSizes(20, 224, 64)), "keys and values longer than latents"),
    ],
)
def test_sizes_that_would_not_be_quicker_are_refused(sizes: ExpandedSizes, reason: str) -> None:
    assert expanded.refuses(sizes, PROMPTS) == reason


def test_room_is_for_as_many_tokens_as_a_half_gibibyte_holds() -> None:
    """Of GLM-4.7-Flash a token takes 20 * (192 + 256) + 64 numbers of two bytes."""
    assert expanded.count_room(FLASH, 2, 10**9) == (512 << 20) // 18048
    assert expanded.count_room(FLASH, 2, 4096) == 4096


def take_first(name: str, candidates: dict[str, Callable[[], Tensor]]) -> Tensor:  # noqa: ARG001
    """Compute by the kernel of many rows."""
    return next(iter(candidates.values()))()


def test_a_layer_of_expanded_prompts_launches_its_kernels_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "compute", take_first)
    monkeypatch.setattr(launch_traces, "_CONFIGS", _CONFIGS)
    lines: list[str] = []
    with pretended_gpu(lines.append):
        model = launch_traces.load_case(launch_traces.Case("glm-4.7-flash", "bf16"))
        batch = Batch.allocate(
            max_tokens=2048, max_rows=32, num_slots=32, max_blocks=8, max_model_len=128, device=model.device
        )
        kv_cache = model.allocate_kv_cache(8, 16)
        Runner(model).compute_logits(batch, kv_cache, Bucket(2048, 32))
    names = [re.sub(r"[(<].*| \d+x.*", "", line).rpartition(".")[2] for line in lines]
    first = names.index("_turn_and_store")
    assert names[: names.index("_norm")].count("_plan") == 3 and "_leave_out" in names
    assert names[first : first + 10] == [
        "_turn_and_store",
        "_multiply_absorbed",
        "attend_latents",
        "attend_latents",
        "_multiply_absorbed",
        "_expand_tokens",
        "_expand_tokens",
        "_attend_skipped",
        "_attend_expanded",
        "linear",
    ]


def plan_like_others(
    batch: Batch, num_tokens: int, num_rows: int, sizes: ExpandedSizes, cache: LayerCache, dtype: torch.dtype
) -> MixLatents:
    """Plan what steps do without another form."""
    kernels = cpu_latent.KERNELS
    plan = plan_latent_attention(kernels, batch, num_tokens, num_rows, sizes.latents, cache, dtype)

    def mix(
        query: Tensor,
        kept: Tensor,
        rotation: Tensor,
        kv_slots: Tensor,
        cache: LayerCache,
        expansion: Expansion,
        scale: float,
        kv_scales: KvScales,
    ) -> Tensor:
        _USED.append((sizes, expansion.keys.shape[1], expansion.values.shape[1]))
        absorbed = absorb_and_store(kernels, query, kept, rotation, kv_slots, cache, expansion, kv_scales)
        return expand(kernels, latent_attention(absorbed, cache, plan, scale, kv_scales), expansion)

    return mix


_USED: list[tuple[ExpandedSizes, int, int]] = []


def test_a_form_that_the_plan_names_gets_what_other_steps_compute_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("deepseek_v3", tmp_path)
    prompts = make_prompts()[3:6]
    expected = generate(tmp_path, prompts, "cpu")
    kernels = cpu_latent.KERNELS._replace(forms={"latent attention": plan_like_others})
    code = code_of(torch.device("cpu"))
    monkeypatch.setattr(code, "kernels", replace(code.kernels, latent=kernels))
    _USED.clear()
    found = generate(tmp_path, prompts, "cpu")
    assert (found.alone, found.together) == (expected.alone, expected.together)
    assert _USED and all((sizes.nope, sizes.value) == (nope, value) for sizes, nope, value in _USED)
