# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts on a GPU: the mixture with their updates, against the CPU's, one adapter after the other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_lora_update import make_adapters, make_batch, to_device
from torch import Tensor

from blink.errors import ConfigError
from blink.kernels.cpu import moe as cpu
from blink.kernels.lora import GroupedUpdates, LowRank, TokenUpdates, Updates, WeightParts
from blink.kernels.operands import Activation
from blink.lora_config import LoraConfig
from blink.plan.site import Bucket

gpu_moe = pytest.importorskip("blink.kernels.gpu.moe.grouped")
experts_module = pytest.importorskip("blink.kernels.gpu.lora.experts")
memory = pytest.importorskip("blink.kernels.gpu.lora.memory")

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
EXPERTS, HIDDEN, SIZE = 5, 80, 48
PARTS = (
    WeightParts((2 * SIZE, HIDDEN), (slice(0, SIZE), slice(SIZE, 2 * SIZE)), EXPERTS),
    WeightParts((HIDDEN, SIZE), (slice(0, HIDDEN),), EXPERTS),
)
NUM_ADAPTERS = 5


def draw_update(parts: WeightParts, rank: int, seed: int, dtype: torch.dtype) -> tuple[LowRank, ...]:
    """Return an update of each matrix of experts' weight, but for one expert's; of some seeds not of the first."""
    draw = torch.Generator().manual_seed(seed)
    found: list[LowRank] = []
    for rows in parts.rows:
        down = torch.randn(EXPERTS, rank, parts.shape[1], generator=draw) / parts.shape[1] ** 0.5
        up = torch.randn(EXPERTS, rows.stop - rows.start, rank, generator=draw) / rank**0.5
        up[seed % EXPERTS] = 0
        found.append(LowRank(rows, down.to(dtype), up.to(dtype)))
    return tuple(found[seed % 3 == 1 :])


def as_float(updates: Updates) -> Updates:
    return {
        key: [LowRank(each.rows, each.down.float(), each.up.float()) for each in own] for key, own in updates.items()
    }


STEPS = [
    ([1], [1], 2),
    ([0, 2, 1, 2, 0, 3, 5], [1] * 7, 3),
    ([index % 6 for index in range(33)], [1] * 33, 2),
    ([3, 0, 1, 1, 2], [140, 20, 1, 80, 9], 3),  # many pairs: tiles of one adapter, of several and of none
    ([0, 0], [5, 3], 1),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rank", [3, 16, 100])
@pytest.mark.parametrize("shares_tiles", [False, True])
@pytest.mark.parametrize(("row_adapters", "lengths", "top_k"), STEPS)
def test_updates_of_experts_equal_those_of_one_adapter_after_the_other(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    row_adapters: list[int],
    lengths: list[int],
    top_k: int,
    shares_tiles: bool,
    rank: int,
    dtype: torch.dtype,
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16")
    if shares_tiles:
        monkeypatch.setattr(experts_module, "MOST_PAIRS", 0)
    used, tokens = sum(lengths), sum(lengths) + 4  # of them, four are padding
    weights = draw_weights(dtype)
    held = [
        {id(weight): draw_update(parts, rank, 9 * place + seed, dtype) for place, (weight, parts) in
         enumerate(zip(weights, PARTS, strict=True)) if (place, seed) != (0, 3)}
        for seed in range(NUM_ADAPTERS)
    ]  # fmt: skip
    batch = to_device(make_batch(row_adapters, lengths, NUM_ADAPTERS, tokens), device)
    stores = [weight.to(device) for weight in weights]
    names = {id(weight): id(store) for weight, store in zip(weights, stores, strict=True)}
    like = torch.empty(0, dtype=dtype, device=device)
    adapters = make_adapters(
        {names[id(weight)]: parts for weight, parts in zip(weights, PARTS, strict=True)},
        [{names[key]: own for key, own in each.items()} for each in held],
        rank,
        like,
    )
    bucket = Bucket(tokens, len(lengths), decoding=False, adapters=True)
    x, logits = draw_rows(tokens, dtype)
    x[used:], logits[used:] = torch.nan, torch.nan
    count = torch.tensor([used], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"top_k": top_k, "renormalize": True}
    found = gpu_moe.moe(
        x.to(device), logits.to(device), *stores, count, updates=adapters.find(batch, bucket), **options
    )
    of_tokens = torch.tensor(row_adapters).repeat_interleave(torch.tensor(lengths))
    expected = expect(x[:used], logits[:used], weights, of_tokens, held, **options)
    torch.testing.assert_close(found[:used].cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    none = to_device(make_batch([0] * len(lengths), lengths, NUM_ADAPTERS, tokens), device)
    without = gpu_moe.moe(
        x.to(device), logits.to(device), *stores, count, updates=adapters.find(none, bucket), **options
    )
    changed = (found != without).any(1).cpu()[:used]
    assert torch.equal(changed, of_tokens > 0), "tokens with an adapter, and they alone, are changed"


def draw_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    gate_up = torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=draw) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, SIZE, generator=draw) / SIZE**0.5
    return gate_up.to(dtype), down.to(dtype)


def draw_rows(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows, and logits of which no two of a token are equal."""
    draw = torch.Generator().manual_seed(4)
    logits = torch.rand(tokens, EXPERTS, generator=draw).argsort(-1) / 4
    return torch.randn(tokens, HIDDEN, generator=draw).to(dtype), logits.to(dtype)


def expect(
    x: Tensor,
    logits: Tensor,
    weights: tuple[Tensor, Tensor],
    of_tokens: Tensor,
    held: Sequence[Updates],
    **options: Any,
) -> Tensor:
    """Return the results of the plain reference in float32."""
    exact = [weight.float() for weight in weights]
    names = {id(weight): id(each) for weight, each in zip(weights, exact, strict=True)}
    groups = [
        TokenUpdates((of_tokens == index + 1).nonzero()[:, 0], {names[key]: own for key, own in as_float(each).items()})
        for index, each in enumerate(held)
    ]
    return cpu.moe(x.float(), logits.float(), *exact, updates=GroupedUpdates(groups), **options)


def test_pairs_of_several_adapters_share_a_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check = test_updates_of_experts_equal_those_of_one_adapter_after_the_other
    check(device, monkeypatch, *STEPS[1], shares_tiles=True, rank=3, dtype=torch.float32)


@pytest.mark.parametrize("activation", ["gelu_tanh", "clipped_silu"])
def test_updates_come_before_the_activation_and_behind_the_bias(device: torch.device, activation: Activation) -> None:
    weights = draw_weights(torch.float32)
    held = [{id(weight): draw_update(parts, 4, 2, torch.float32) for weight, parts in zip(weights, PARTS, strict=True)}]
    biases = torch.randn(EXPERTS, 2 * SIZE), torch.randn(EXPERTS, HIDDEN)
    stores = [weight.to(device) for weight in weights]
    updates = {id(store): held[0][id(weight)] for weight, store in zip(weights, stores, strict=True)}
    like = torch.empty(0, device=device)
    adapters = make_adapters({id(store): parts for store, parts in zip(stores, PARTS, strict=True)}, [updates], 4, like)
    batch = to_device(make_batch([1, 0, 1], [1, 1, 1], 1, 3), device)
    step = adapters.find(batch, Bucket(3, 3, decoding=True, adapters=True))
    x, logits = draw_rows(3, torch.float32)
    options: dict[str, Any] = {"top_k": 2, "renormalize": False, "activation": activation}
    count = torch.tensor([3], dtype=torch.int32, device=device)
    moved = tuple(bias.to(device) for bias in biases)
    found = gpu_moe.moe(x.to(device), logits.to(device), *stores, count, biases=moved, updates=step, **options)
    expected = expect(x, logits, weights, torch.tensor([1, 0, 1]), held, biases=biases, **options)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-4, atol=2e-4)


def test_memory_counts_experts(device: torch.device) -> None:
    parts = {1: PARTS[0], 2: PARTS[1]}
    adapters = memory.GpuAdapters(parts, 3, 2, 16, torch.empty(0, dtype=torch.bfloat16, device=device))
    assert memory.count_numbers(parts, 16) == EXPERTS * 16 * (2 * HIDDEN + 2 * SIZE + SIZE + HIDDEN)
    assert adapters.nbytes == 2 * 2 * memory.count_numbers(parts, 16)


def test_a_gpu_without_room_for_experts_is_told_how_many_bytes_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_adapters = pytest.importorskip("blink.engine.gpu_adapters")

    def find_no_room(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_adapters, "Uploader", lambda: None)
    monkeypatch.setattr(gpu_adapters, "GpuAdapters", find_no_room)
    model: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"))
    lora = LoraConfig(enable_lora=True, max_loras=3, max_lora_rank=16)
    parts = {1: PARTS[0], 2: PARTS[1], 3: WeightParts((64, 32), (slice(0, 64),))}
    of_experts = 2 * 3 * 16 * EXPERTS * (2 * HIDDEN + 2 * SIZE + SIZE + HIDDEN)
    whole = of_experts + 2 * 3 * 16 * (32 + 64)
    with pytest.raises(ConfigError, match=f"which take {whole} bytes, {of_experts} of them for experts: lower"):
        gpu_adapters.make_gpu_adapters(lora, model, parts)


def test_experts_without_updates_take_the_gated_kernel(device: torch.device) -> None:
    weights = [weight.to(device) for weight in draw_weights(torch.float32)]
    other = torch.empty(32, 32)
    adapters = make_adapters(
        {id(other): WeightParts((32, 32), (slice(0, 32),))}, [{}], 4, torch.empty(0, device=device)
    )
    batch = to_device(make_batch([1], [1], 1, 1), device)
    step = adapters.find(batch, Bucket(1, 1, decoding=True, adapters=True))
    assert step.of_pairs(weights, None, 2) is None
