# SPDX-License-Identifier: Apache-2.0
"""The kernels of decoding in one order (`--deterministic`): a row's bits are those that it has alone, in steps of any
size, and close to the plain reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from attention_batch import Rows
from blink.formats.base import Weight, plain
from blink.formats.fp8 import quantize_fp8
from blink.formats.packed import PackedWeight, pack, unpack
from blink.formats.schemes import FormatId
from blink.kernels.activation import activate
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import HeadNorm
from blink.kernels.rotary import make_rotary_table
from blink.models.rope import Rope

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_decode_kernels import attend_reference, draw, error, on_gpu

from blink.kernels.gpu.attention.decode import decode_attention, list_tokens
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import in_tiles, ordered
from blink.kernels.gpu.gemm.hi_lo import split_rows

pytestmark = pytest.mark.skipif(not has_warpgroups(), reason="needs Hopper's warpgroup MMAs")

EPS, BLOCK_SIZE = 1e-5, 16
ALL_ROWS = 300
# Rows alone at each end of a tile, and tiles of each size that begin anywhere.
ALONE = (0, 1, 7, 8, 15, 16, 31, 47, 63, 64, 127, 128, 299)
PARTS = ((0, 2), (3, 11), (3, 19), (7, 39), (9, 70), (0, 65), (50, 147), (1, 129), (100, 300))


def same_bits(found: Tensor, expected: Tensor, what: object = "") -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


class Layer:
    """The GEMMs of a layer and of the output layer. Every row begins with an embedding of its own."""

    def __init__(self, hidden: int, inner: int, *, packed: bool) -> None:
        torch.manual_seed(hidden)
        self.packed = packed
        self.start, self.norms = draw(ALL_ROWS, hidden), draw(3, hidden)
        width = hidden * 3 // 2
        self.bias = draw(width)
        shapes = {"qkv": (width, hidden), "output": (hidden, hidden), "gate_up": (2 * inner, hidden)}
        shapes |= {"down": (hidden, inner), "head": (1000, hidden)}
        self.plain = {name: draw(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
        self.weights: dict[str, Weight] = {**self.plain}
        if packed:
            self.weights = {name: pack([quantize_fp8(weight)]) for name, weight in self.plain.items()}

    def run(self, first: int, end: int) -> dict[str, Tensor]:
        """Return what all kernels write of some rows, one behind the other [rows, ...]."""
        rows, weights = end - first, self.weights
        order = FormatId.FP8 if self.packed else None
        tokens = in_tiles.pad(rows, packed=self.packed)
        ids = torch.arange(first, end, dtype=torch.int32, device="cuda")
        residual, normed = gemm.embed(ids, self.start, self.norms[0], hi_lo=order, tokens=tokens)
        qkv = gemm.normed_linear(normed, EPS, weights["qkv"], self.bias, ordered=True)
        x = qkv[:, : residual.shape[1]].contiguous()
        x = split_rows(x, order) if order else x
        following = gemm.add_linear(
            x, weights["output"], residual, self.norms[1], hi_lo=order, tokens=tokens, ordered=True
        )
        attended = residual.clone()
        gated = gemm.gated_linear(following, EPS, weights["gate_up"], hi_lo=order, ordered=True)
        last = gemm.add_linear(gated, weights["down"], residual, self.norms[2], tokens=tokens, ordered=True)
        logits = ordered.multiply(residual, weights["head"])
        found = {"qkv": qkv, "attended": attended, "residual": residual, "next": last.x, "logits": logits}
        found |= {"gated": rows_first(gated), "following": rows_first(following.x)}
        for name, one in (("squares", following), ("last squares", last)):
            found[name] = one.square_sums[:, :rows].T
        return found

    def expect(self) -> dict[str, Tensor]:
        """Return the same of all rows, in float32."""
        weights = {name: self._exact(weight) for name, weight in self.weights.items()}
        residual, norms = self.start.float(), self.norms.float()
        qkv = functional.linear(rms_norm_torch(residual, norms[0], EPS), weights["qkv"], self.bias.float())
        attended = residual + qkv[:, : residual.shape[1]] @ weights["output"].T
        gated = activate(functional.linear(rms_norm_torch(attended, norms[1], EPS), weights["gate_up"]))
        residual = attended + gated @ weights["down"].T
        found = {"qkv": qkv, "attended": attended, "residual": residual, "next": residual * norms[2]}
        return found | {"logits": residual @ weights["head"].T}

    @staticmethod
    def _exact(weight: Weight) -> Tensor:
        return unpack(weight).dequantize(torch.float32) if isinstance(weight, PackedWeight) else plain(weight).float()


def rows_first(x: Tensor) -> Tensor:
    """Return activations, or hi/lo FP8 of them, with rows as the first dimension."""
    return x.transpose(0, 1) if x.ndim == 3 else x


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("hidden", "inner"), [(512, 1536), (1024, 2816), (4096, 14336)])
def test_rows_of_gemms_are_the_rows_alone(hidden: int, inner: int, packed: bool) -> None:
    layer = Layer(hidden, inner, packed=packed)
    whole = layer.run(0, ALL_ROWS)
    for name, expected in layer.expect().items():
        assert error(whole[name], expected) < 2e-2, name
    for first, end in (*((row, row + 1) for row in ALONE), *PARTS):
        for name, found in layer.run(first, end).items():
            same_bits(found, whole[name][first:end], (name, first, end))


LENGTH, MOST_DRAFTS = 700, 15
EDGES = (1, 15, 16, 17, 255, 256, 257, 300, 513, LENGTH)
STEPS: dict[str, Rows] = {
    "chunk": [(27, 276)],
    "mixed": [(1, 9), (1, 257), (5, 5), (11, 260), (33, LENGTH - 2)],
    "prompts": [(LENGTH, LENGTH), (3, 3)],
}


class Text:
    """A text's QKV and its keys in a cache, of which any tokens may be in a step."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, *, has_norm: bool) -> None:
        torch.manual_seed(heads)
        self.heads, count = heads, -(-LENGTH // BLOCK_SIZE)
        self.blocks = torch.randperm(count + 4)[:count].to(torch.int32)
        self.qkv = draw(LENGTH, (heads + 2 * kv_heads) * head_dim)
        self.empty = draw(2, count + 4, BLOCK_SIZE, kv_heads, head_dim)
        self.cache = LayerCache(self.empty.clone())
        self.table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), LENGTH, "cuda")
        weights = torch.rand(2, head_dim, device="cuda").to(torch.bfloat16) + 0.5
        self.norm = HeadNorm(weights[0], weights[1], 1e-6) if has_norm else None

    def make_batch(self, rows: Rows, padding: int = 0, siblings: int = 0) -> Batch:
        tokens = [place for count, length in rows for place in range(length - count, length)]
        batch = Batch.allocate(
            max_tokens=len(tokens) + padding,
            max_rows=len(rows) + padding,
            num_slots=4,
            max_blocks=len(self.blocks),
            max_model_len=LENGTH,
            most_siblings=siblings,
        )
        batch.block_tables.fill_(10**8)
        batch.block_tables[2], batch.row_slots[:] = self.blocks, 2
        places = torch.tensor(tokens)
        batch.positions[: len(tokens)] = places
        batch.kv_slots.fill_(-1)
        batch.kv_slots[: len(tokens)] = self.blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        ends = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
        batch.query_starts.fill_(len(tokens))
        batch.query_starts[: len(ends)] = ends
        batch.context_lens[: len(rows)] = torch.tensor([length for _, length in rows])
        batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = len(rows), len(tokens)
        return batch

    def attend(self, batch: Batch, *, stored: bool, order: FormatId | None = None) -> tuple[Tensor, Tensor]:
        """Return what a step's tokens attend to, and their places in the text."""
        places, count = batch.positions, int(batch.header[Header.NUM_TOKENS])
        moved = on_gpu(batch)
        rows = list_tokens(moved, len(places), len(batch.row_slots)) if stored else moved
        qkv = self.qkv[places.long().cuda()]
        found = decode_attention(qkv, self.cache, rows, self.table, self.norm, ordered=True, stored=stored, hi_lo=order)
        found = rows_first(found)
        assert order is not None or not found[count:].any()
        return found[:count], places[:count].cuda()


@pytest.fixture(params=[(32, 8, 128, False), (12, 4, 64, True), (8, 8, 128, True)], ids=["llama", "norm", "one-query"])
def text(request: pytest.FixtureRequest) -> Iterator[Text]:
    heads, kv_heads, head_dim, has_norm = request.param
    yield Text(heads, kv_heads, head_dim, has_norm=has_norm)


@pytest.mark.parametrize("order", [None, FormatId.FP8], ids=["bf16", "hi_lo"])
def test_tokens_attend_alike_in_any_step(text: Text, order: FormatId | None) -> None:
    whole, _ = text.attend(text.make_batch([(LENGTH, LENGTH)]), stored=True, order=order)
    cells = text.cache.cells.clone()
    for name, rows in STEPS.items():
        found, places = text.attend(text.make_batch(rows, padding=5), stored=True, order=order)
        same_bits(found, whole[places], name)
    for length in EDGES:  # alone, and among others
        found, places = text.attend(text.make_batch([(1, length)]), stored=False, order=order)
        same_bits(found, whole[places], length)
    decoding = text.make_batch([(1, edge) for edge in EDGES], padding=3)
    found, places = text.attend(decoding, stored=False, order=order)
    same_bits(found, whole[places], "decoding")
    for length, count in ((LENGTH, 6), (260, MOST_DRAFTS), (17, 3)):
        rows: Rows = [(1, length - count + 1 + i) for i in range(count)]
        batch = text.make_batch(rows, siblings=MOST_DRAFTS)
        assert batch.has_siblings
        found, places = text.attend(batch, stored=False, order=order)
        same_bits(found, whole[places], ("drafts", length))
    same_bits(text.cache.cells, cells, "what decoding stores is what prompts store")


def test_stored_tokens_attend_as_the_reference(text: Text) -> None:
    found, _ = text.attend(text.make_batch([(LENGTH, LENGTH)]), stored=True)
    batch, norm = text.make_batch([(1, length) for length in range(1, LENGTH + 1)]), text.norm
    norm = norm and HeadNorm(norm.query_weight.cpu(), norm.key_weight.cpu(), norm.eps)
    expected = attend_reference(text.qkv.cpu(), text.cache.cells.cpu(), batch, text.table.cpu(), text.heads, norm)
    assert error(found.cpu(), expected) < 1e-2


def test_rows_that_are_listed_end_with_padding(text: Text) -> None:
    batch = on_gpu(text.make_batch([(1, 9), (3, 20)], padding=2))
    listed = list_tokens(batch, 6, 4)
    assert listed.context_lens.tolist() == [9, 18, 19, 20, 0, 0]
    assert listed.row_slots[:4].tolist() == [2, 2, 2, 2]
    assert listed.kv_slots is batch.kv_slots and listed.block_tables is batch.block_tables
