# SPDX-License-Identifier: Apache-2.0
"""The kernels of `--deterministic`: a token's bits are those that it has alone, and close to the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_batch import Rows
from blink.formats.fp8 import quantize_fp8
from blink.formats.packed import pack, unpack
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu import attention as cpu
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION
from model_specs import make_attention
from triton_interpreter import IS_INTERPRETED

attention = pytest.importorskip("blink.kernels.gpu.attention.invariant")
gemm = pytest.importorskip("blink.kernels.gpu.gemm.invariant")

DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
TOLERANCE = 3e-5 if IS_INTERPRETED else 2e-2
# Of a sequence: keys are cut at every CHUNK.
CHUNK, LENGTH = (64, 140) if IS_INTERPRETED else (256, 1500)
BLOCK_SIZE, SLOT = 16, 3


def add_in_order(a: Any, b: Any, d: Any, *_: Any) -> Any:
    """Multiply as MMAs of 16 do: one product after the other is added to a sum, whatever the size of the matrices."""
    from triton.runtime.interpreter import TensorHandle

    found = d.data.copy()
    for k in range(a.data.shape[1]):
        found = found + a.data[:, k, None] * b.data[None, k]
    return TensorHandle(found.astype(np.float32), d.dtype.scalar)


@pytest.fixture(autouse=True)
def _one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply in an order that the kernels decide, not NumPy's library; cut shorter chunks."""
    if IS_INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda _, *operands: add_in_order(*operands))
        monkeypatch.setattr(attention, "CHUNK", CHUNK)


def same_bits(found: Tensor, expected: Tensor) -> None:
    kind = torch.int32 if found.element_size() == 4 else torch.int16
    torch.testing.assert_close(found.view(kind), expected.view(kind), rtol=0, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "size"), [(96, 200), (70, 64), (33, 128), (4096, 1024)])
def test_a_row_of_a_gemm_is_the_row_alone(
    device: torch.device, outputs: int, size: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED and outputs > 1000:
        pytest.skip("a shape more that takes Triton's interpreter seconds")
    torch.manual_seed(outputs)
    x = torch.randn(150, size).to(DTYPE).to(device)
    weight, bias = (torch.randn(outputs, *rest).to(DTYPE).to(device) for rest in ((size,), ()))
    given = bias if has_bias else None
    whole = gemm.multiply(x, weight, given)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if given is None else given.float())
    torch.testing.assert_close(whole.float(), expected, rtol=TOLERANCE, atol=TOLERANCE * size**0.5)
    for row in (0, 5, 16, 149):
        same_bits(gemm.multiply(x[row : row + 1], weight, given)[0], whole[row])
    for enough in (1, 1 << 30):  # large tiles and small ones
        monkeypatch.setattr(gemm, "_ENOUGH", enough)
        for first, end in ((0, 2), (3, 19), (7, 39), (0, 65), (50, 147), (0, 150)):
            same_bits(gemm.multiply(x[first:end].contiguous(), weight, given), whole[first:end])


@pytest.mark.parametrize(("outputs", "size"), [(96, 256), (48, 128), (4096, 1024)])
def test_a_row_of_a_gemm_in_fp8_is_the_row_alone(
    device: torch.device, outputs: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED and outputs > 1000:
        pytest.skip("a shape more that takes Triton's interpreter seconds")
    torch.manual_seed(size)
    x = torch.randn(70, size).to(DTYPE).to(device)
    weight = pack([quantize_fp8(torch.randn(outputs, size, device=device))])
    bias = torch.randn(outputs).to(DTYPE).to(device)
    whole = gemm.multiply_fp8(x, weight, bias)
    exact = unpack(weight).dequantize(torch.float32)
    torch.testing.assert_close(
        whole.float(), x.float() @ exact.T + bias.float(), rtol=TOLERANCE, atol=TOLERANCE * size**0.5
    )
    for enough in (1, 1 << 30):
        monkeypatch.setattr(gemm, "_ENOUGH", enough)
        for first, end in ((5, 6), (3, 19), (7, 39), (0, 65), (0, 70)):
            same_bits(gemm.multiply_fp8(x[first:end].contiguous(), weight, bias), whole[first:end])


class Sequence:
    """A sequence in a cache, of which any tokens may be queries."""

    def __init__(self, device: torch.device, heads: tuple[int, int], head_dim: int) -> None:
        torch.manual_seed(7)
        self.device, self.heads, self.head_dim = device, heads, head_dim
        count = -(-LENGTH // BLOCK_SIZE)
        self.blocks = torch.randperm(count + 4)[:count].to(torch.int32)
        cells = torch.randn(2, count + 4, BLOCK_SIZE, heads[1], head_dim)
        self.cache = LayerCache(cells.to(DTYPE).to(device))
        self.query = torch.randn(LENGTH, heads[0], head_dim).to(DTYPE).to(device)

    def _make_batch(self, rows: Rows, tokens: int, max_rows: int) -> Batch:
        batch = Batch.allocate(
            max_tokens=tokens,
            max_rows=max_rows,
            num_slots=5,
            max_blocks=len(self.blocks),
            max_model_len=LENGTH,
        )
        batch.block_tables.fill_(10**8)
        batch.block_tables[SLOT] = self.blocks
        batch.row_slots.fill_(SLOT)
        ends = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
        batch.query_starts.fill_(int(ends[-1]))
        batch.query_starts[: len(ends)] = ends
        batch.context_lens[: len(rows)] = torch.tensor([length for _, length in rows])
        batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = len(rows), int(ends[-1])
        batch.header[Header.NUM_DECODE_ROWS] = sum(count == 1 for count, _ in rows)
        return batch

    def attend(self, rows: Rows, padding: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor]:
        """Return what the tokens of rows (queries, context) attend to, and the places of those in the sequence."""
        places = torch.cat([torch.arange(length - count, length) for count, length in rows]).to(self.device)
        tokens, max_rows = len(places) + padding[0], len(rows) + padding[1]
        batch = self._make_batch(rows, tokens, max_rows)
        moved = Batch(**{name: value.to(self.device) for name, value in vars_of(batch).items()})
        query = torch.cat((self.query[places], self.query[: padding[0]]))
        plan = attention.plan_attention(
            moved, tokens, max_rows, [make_attention(*self.heads, self.head_dim)], self.cache
        )
        found = attention.paged_attention(query, self.cache, plan, PLAIN_ATTENTION)
        assert not found[len(places) :].any()
        return found[: len(places)], places

    def expect(self) -> Tensor:
        """Return what all tokens attend to, by the plain reference."""
        batch, cells = self._make_batch([(LENGTH, LENGTH)], LENGTH, 1), self.cache.cells.float().cpu()
        plan = cpu.plan_attention(batch, LENGTH, BLOCK_SIZE, torch.float32)
        return cpu.paged_attention(self.query.float().cpu(), LayerCache(cells), plan, PLAIN_ATTENTION)


def vars_of(batch: Batch) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


EDGES = (1, CHUNK // 2 + 3, CHUNK, CHUNK + 1, 2 * CHUNK + 7, LENGTH)
PARTS: dict[str, tuple[Rows, tuple[int, int]]] = {
    "one": ([(1, LENGTH)], (0, 0)),
    "one short": ([(1, 20)], (0, 0)),
    "decoding": ([(1, edge) for edge in EDGES], (0, 3)),
    "drafts": ([(1, LENGTH - 3), (1, LENGTH - 2), (1, LENGTH - 1), (1, LENGTH)], (0, 0)),
    "mixed": ([(1, 9), (1, CHUNK + 1), (5, 5), (11, CHUNK + 4), (33, LENGTH - 2)], (6, 2)),
    "chunk": ([(27, CHUNK + 20)], (5, 1)),
}


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((8, 1), 128), ((5, 1), 96), ((2, 2), 64)])
def test_a_token_attends_alike_in_any_step(
    device: torch.device, heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = Sequence(device, heads, head_dim)
    whole, _ = sequence.attend([(LENGTH, LENGTH)])
    torch.testing.assert_close(whole.float().cpu(), sequence.expect(), rtol=TOLERANCE, atol=TOLERANCE)
    for programs in (10**6, 1):  # a program for each chunk, and one for all chunks
        monkeypatch.setattr(attention, "_SPLIT_PROGRAMS", programs)
        for rows, padding in PARTS.values():
            found, places = sequence.attend(rows, padding)
            same_bits(found, whole[places])


def test_long_rows_are_cut_only_where_partial_results_have_room(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the bits do not tell."""
    sequence = Sequence(device, (4, 2), 64)
    rows: Rows = [(1, LENGTH), (1, LENGTH - 1)]
    counts = dict[int, int]()
    results = list[Tensor]()
    plan: Callable[..., Any] = attention.plan_span
    for room in (2, 512):
        monkeypatch.setattr("blink.kernels.gpu.attention.plan._MAX_FIXED_CHUNKS", room)

        def count(*arguments: Any, room: int = room) -> Any:
            work = plan(*arguments)
            counts[room] = int((work.items[:, attention.NUM_QUERIES.value] > 0).sum())
            return work

        monkeypatch.setattr(attention, "plan_span", count)
        results.append(sequence.attend(rows)[0])
    assert counts == {2: 2, 512: 2 * -(-LENGTH // CHUNK)}
    same_bits(*results)
