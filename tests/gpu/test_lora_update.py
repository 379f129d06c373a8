# SPDX-License-Identifier: Apache-2.0
"""The kernels of low-rank updates, and the adapters' memory, against what adds one adapter after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.adapters.module import Module
from blink.errors import ConfigError
from blink.kernels.batch import Batch, Param
from blink.kernels.lora import GroupedUpdates, LowRank, TokenUpdates, Updates, WeightParts
from blink.models.weights.cuts import Cut
from blink.plan.site import Bucket

update = pytest.importorskip("blink.kernels.gpu.lora.update")
memory = pytest.importorskip("blink.kernels.gpu.lora.memory")
paging = pytest.importorskip("blink.kernels.gpu.lora.paging")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
QKV = WeightParts((96, 80), (slice(0, 64), slice(64, 80), slice(80, 96)))
WHOLE = WeightParts((48, 300), (slice(0, 48),))


def draw_updates(parts: WeightParts, rank: int, seed: int) -> tuple[LowRank, ...]:
    """Return an update of each matrix of a weight, but for the second."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        LowRank(
            rows,
            torch.randn(rank, parts.shape[1], generator=draw) / parts.shape[1] ** 0.5,
            torch.randn(rows.stop - rows.start, rank, generator=draw) / rank**0.5,
        )
        for place, rows in enumerate(parts.rows)
        if place != 1
    )


def make_adapters(
    weights: dict[int, WeightParts], held: Sequence[Updates], rank: int, like: Tensor, *, pages: bool = True
) -> Any:
    """Return the memory of a GPU with some adapters in it, where pages, the last in the first slot."""
    upload = None if pages else lambda target, source: target.copy_(source)
    adapters = memory.GpuAdapters(weights, len(held), len(held), rank, like, upload)
    assert adapters.is_paged is pages
    for index, updates in enumerate(held):
        adapters.put(index, updates)
        if pages:
            copy_to_slot(adapters, index, len(held) - 1 - index, like.device)
    return adapters


def copy_to_slot(adapters: Any, index: int, slot: int, device: torch.device) -> None:
    """Copy an adapter as the scheduler orders it."""
    order = torch.tensor([index, slot, 7, 6], dtype=torch.int32, device=device)
    paging.copy_ordered([adapters.places], order)


def make_batch(row_adapters: Sequence[int], lengths: Sequence[int], num_adapters: int, tokens: int) -> Batch:
    """Return a step: row_adapters has 1 + the index of each row's adapter, or 0; slots name them in reverse."""
    rows = len(lengths)
    batch = Batch.allocate(
        max_tokens=tokens, max_rows=rows + 3, num_slots=2 * rows, max_blocks=1, max_model_len=8,
        num_adapter_slots=num_adapters,
    )  # fmt: skip
    starts = torch.tensor([0, *lengths]).cumsum(0)
    batch.query_starts[: rows + 1] = starts
    batch.query_starts[rows + 1 :] = starts[-1]
    batch.row_slots[:rows] = torch.arange(rows).flip(0) + rows
    batch.adapter_places.copy_(torch.arange(num_adapters, 0, -1))
    for row, adapter in enumerate(row_adapters):
        slot = num_adapters + 1 - adapter if adapter else 0
        batch.params[int(batch.row_slots[row]), Param.ADAPTER] = slot
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    moved = {field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)}
    return Batch(**moved)


def expect(x: Tensor, base: Tensor, of_tokens: Tensor, held: Sequence[Updates], weight: Tensor, key: int) -> Tensor:
    """Return the results of the plain reference in float32."""
    groups = [
        TokenUpdates((of_tokens == index + 1).nonzero()[:, 0], {id(weight): updates.get(key, ())})
        for index, updates in enumerate(held)
    ]
    return GroupedUpdates(groups).add(base.float(), x.float(), weight)


STEPS = [
    ([1], [1]),
    ([0, 2, 1, 2, 0, 3, 3], [1] * 7),
    ([index % 9 for index in range(33)], [1] * 33),
    ([3, 0, 1, 1, 2], [70, 20, 1, 40, 9]),  # tiles of one adapter, of several and of none
    ([0, 0], [5, 3]),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rank", [3, 16, 100])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(("row_adapters", "lengths"), STEPS)
def test_updates_equal_those_of_one_adapter_after_the_other(
    device: torch.device, row_adapters: list[int], lengths: list[int], pages: bool, rank: int, dtype: torch.dtype
) -> None:
    num_adapters, tokens = 9, sum(lengths) + 4  # of them, four are padding
    of_tokens = torch.tensor(row_adapters).repeat_interleave(torch.tensor(lengths))
    of_tokens = torch.cat((of_tokens, of_tokens.new_zeros(4)))
    batch = to_device(make_batch(row_adapters, lengths, num_adapters, tokens), device)
    keys = {1: QKV, 2: WHOLE}
    held = [{key: draw_updates(parts, rank, seed=9 * key + one) for key, parts in keys.items()} for one in range(9)]
    weights = {key: torch.empty(parts.shape) for key, parts in keys.items()}
    like = torch.empty(0, dtype=dtype, device=device)
    adapters = make_adapters({id(weights[key]): parts for key, parts in keys.items()}, [
        {id(weights[key]): each for key, each in updates.items()} for updates in held
    ], rank, like, pages=pages)  # fmt: skip
    assert adapters.find(batch, Bucket(tokens, len(lengths), decoding=False)) is None
    found = adapters.find(batch, Bucket(tokens, len(lengths), decoding=False, adapters=True))
    for key, parts in keys.items():
        draw = torch.Generator().manual_seed(key)
        x = torch.randn(tokens, parts.shape[1], generator=draw).to(dtype)
        base = torch.randn(tokens, parts.shape[0], generator=draw).to(dtype)
        result = found.add(base.to(device), x.to(device), weights[key])
        expected = expect(x, base, of_tokens, held, weights[key], key)
        torch.testing.assert_close(result.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        untouched = of_tokens == 0
        assert torch.equal(result.cpu()[untouched], base[untouched]), "a token without an adapter was changed"
    other = torch.empty(1)
    assert found.add(other, other, other) is other


def test_a_tile_of_many_tokens_has_several_adapters(device: torch.device) -> None:
    check = test_updates_equal_those_of_one_adapter_after_the_other
    check(device, *STEPS[3], pages=False, rank=3, dtype=torch.float32)


def test_programs_of_few_tokens_take_wide_tiles_of_a_wide_weight(device: torch.device) -> None:
    weight, like = torch.empty(33 * 256, 40), torch.empty(0, device=device)
    parts = WeightParts((33 * 256, 40), (slice(0, 256), slice(256, 33 * 256)))
    held = [{id(weight): draw_updates(parts, 5, seed=seed)} for seed in range(2)]
    adapters = make_adapters({id(weight): parts}, held, 5, like)
    batch = to_device(make_batch([2, 0, 1], [1, 1, 1], 2, 3), device)
    found = adapters.find(batch, Bucket(3, 3, decoding=True, adapters=True))
    x, base = torch.randn(3, 40), torch.randn(3, 33 * 256)
    finish = found.begin(x.to(device), weight)
    result = finish(base.to(device), torch.full((3,), 2.0, device=device))
    expected = expect(2 * x, base, torch.tensor([2, 0, 1]), held, weight, id(weight))
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_parts_of_two_ranks_make_the_whole_update(device: torch.device) -> None:
    """Each memory takes its own part of what all ranks are given: of rows of a matrix, and of columns of another."""
    (out, size), tokens, draw = (64, 96), 5, torch.Generator().manual_seed(4)
    down, up, x = (torch.randn(*shape, generator=draw) for shape in ((8, size), (out, 8), (tokens, size)))
    spans = torch.arange(out).chunk(2), torch.arange(size).chunk(2)
    by_rows = [Module(torch.empty(32, size), slice(0, 32), (32, size), None, cut=Cut(0, out, own)) for own in spans[0]]
    by_columns = [
        Module(torch.empty(out, 48), slice(0, out), (out, 48), None, cut=Cut(1, size, own)) for own in spans[1]
    ]
    given = {id(one.weight): [LowRank(one.rows, *one.take(down, up))] for one in (*by_rows, *by_columns)}
    batch, like = to_device(make_batch([1], [tokens], 1, tokens), device), torch.empty(0, device=device)
    bucket = Bucket(tokens, 1, decoding=False, adapters=True)
    rows, total = list[Tensor](), torch.zeros(tokens, out, device=device)
    for modules, columns in zip(zip(by_rows, by_columns, strict=True), spans[1], strict=True):
        weights = {id(one.weight): WeightParts(one.shape, (one.rows,)) for one in modules}
        found = make_adapters(weights, [given], 8, like, pages=False).find(batch, bucket)
        rows.append(found.add(torch.zeros(tokens, 32, device=device), x.to(device), modules[0].weight))
        total = found.add(total, x[:, columns].contiguous().to(device), modules[1].weight)
    expected = x @ down.T @ up.T
    torch.testing.assert_close(torch.cat(rows, 1).cpu(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_an_adapter_is_written_whole_over_the_one_before_it(device: torch.device) -> None:
    weight, like = torch.empty(QKV.shape), torch.empty(0, device=device)
    large = {id(weight): draw_updates(QKV, 16, seed=1)}
    small = {id(weight): draw_updates(QKV, 2, seed=2)[:1]}
    for pages in (False, True):
        adapters = make_adapters({id(weight): QKV}, [large, large], 16, like, pages=pages)
        fresh = make_adapters({id(weight): QKV}, [small, large], 16, like, pages=pages)
        adapters.clear(0)
        adapters.put(0, small)
        if pages:
            assert not torch.equal(adapters._slots, fresh._slots)
            copy_to_slot(adapters, 0, 1, device)
        assert torch.equal(adapters._slots, fresh._slots)
        assert adapters.nbytes == 2 * 4 * 16 * (3 * 80 + 96)


def test_a_copy_goes_to_its_slot_alone_and_only_once(device: torch.device) -> None:
    """The parts of all ranks go by one order."""
    places: list[tuple[Tensor, Tensor]] = []
    for size in (3 * 24 * 4096 + 32, 64):  # more than the programs read at once, and a rest; little
        held = torch.arange(3 * size, dtype=torch.int32).reshape(3, size)
        held = held.pin_memory() if device.type == "cuda" else held
        places.append((held, torch.zeros(2, size, dtype=torch.int32, device=device)))
    order = torch.tensor([2, 1, 5, 5], dtype=torch.int32, device=device)
    paging.copy_ordered(places, order)
    assert not any(slots.any() for _, slots in places)
    order[2] = 6
    paging.copy_ordered(places, order)
    for held, slots in places:
        assert torch.equal(slots.cpu(), torch.stack((torch.zeros_like(held[2]), held[2])))
    assert order.tolist() == [2, 1, 6, 6]


def test_a_weight_of_narrow_matrices_is_refused(device: torch.device) -> None:
    parts = WeightParts((48, 32), (slice(0, 40), slice(40, 48)))
    with pytest.raises(ConfigError, match="too narrow"):
        make_adapters({1: parts}, [], 16, torch.empty(0, device=device))


@pytest.mark.parametrize(("rank", "padded"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (320, 320)])
def test_ranks_are_padded_to_tiles(rank: int, padded: int) -> None:
    assert memory.pad_rank(rank) == padded
