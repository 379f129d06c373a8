# SPDX-License-Identifier: Apache-2.0
"""Several rows of one text in a step, as drafts are verified: each gets what it would get in a step of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.grammar.automaton import Automaton
from blink.kernels.batch import LISTS_OF_SLOT, PLACE_WORDS, Batch, Header
from blink.kernels.cpu.constraint import list_allowed
from blink.kernels.gpu.device import has_clusters
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import HeadNorm, KvScales
from blink.kernels.rotary import make_rotary_table
from blink.models.rope import Rope

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_constrained_sampling import BEGUN, KINDS, UNIQUE, VOCABULARY, move, text_tokens
from test_decode_kernels import draw, on_gpu

from blink.kernels.gpu import constraint
from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm.tile_configs import AttentionConfig
from constrained_batch import NUM_PROMPT, make_constrained

MOST_DRAFTS = 15
MAX_LEN = 1024
Groups = list[tuple[int, int]]  # the keys of a text's last row, and how many rows it has


def make_groups(groups: Groups, block_size: int) -> Batch:
    """Make a CPU batch of texts on shuffled blocks, each with several rows at its last positions."""
    lengths = [(slot, length - count + 1 + i) for slot, (length, count) in enumerate(groups) for i in range(count)]
    blocks_of_text = MAX_LEN // block_size
    batch = Batch.allocate(
        max_tokens=len(lengths),
        max_rows=len(lengths),
        num_slots=len(groups),
        max_blocks=blocks_of_text,
        max_model_len=MAX_LEN,
        most_siblings=MOST_DRAFTS,
    )
    batch.block_tables.copy_(torch.randperm(len(groups) * blocks_of_text, dtype=torch.int32).view(len(groups), -1))
    for row, (slot, length) in enumerate(lengths):
        block = int(batch.block_tables[slot, (length - 1) // block_size])
        batch.row_slots[row], batch.context_lens[row], batch.positions[row] = slot, length, length - 1
        batch.kv_slots[row] = block * block_size + (length - 1) % block_size
    for word in (Header.NUM_ROWS, Header.NUM_TOKENS, Header.NUM_DECODE_ROWS):
        batch.header[word] = len(lengths)
    return batch


def one_row(batch: Batch, row: int) -> Batch:
    """Return a step of one of the rows, of an engine without drafts."""
    of_row = ("row_slots", "context_lens", "positions", "kv_slots")
    alone = {name: getattr(batch, name)[row : row + 1].contiguous() for name in of_row}
    return dataclasses.replace(
        batch, **alone, automaton_places=batch.automaton_places[:, : LISTS_OF_SLOT * PLACE_WORDS]
    )


@pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")
@pytest.mark.parametrize(
    "groups",
    [
        [(2, 2)],
        [(16, 16)],
        [(17, 2), (33, 3)],
        [(300, 6), (31, 1), (40, 16), (1, 1), (65, 4)],
        [(length, count) for length, count in zip(range(500, 540), [1, 2, 5, 6, 9, 16, 3, 4] * 5, strict=True)],
    ],
    ids=["two", "all", "borders", "some", "many"],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "with_norm"), [(8, 2, 128, True), (9, 3, 64, False), (5, 1, 128, False)]
)
@pytest.mark.parametrize(
    ("config", "block_size"),
    [(AttentionConfig(1, 1, 1), 16), (AttentionConfig(2, 4, 2), 32), (AttentionConfig(4, 2, 3), 16)],
)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_of_one_text_attend_as_in_steps_of_their_own(
    groups: Groups,
    heads: int,
    kv_heads: int,
    head_dim: int,
    with_norm: bool,
    config: AttentionConfig,
    is_fp8: bool,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit by bit; what the cache has in the rows' own cells before is not a number, of which attention makes zeros."""
    monkeypatch.setattr("blink.kernels.gpu.attention.decode.choose_attention_config", lambda *_: config)
    torch.manual_seed(3)
    batch = on_gpu(make_groups(groups, block_size))
    rows, num_blocks = len(batch.row_slots), batch.block_tables.numel()
    qkv = draw(rows, (heads + 2 * kv_heads) * head_dim)
    cells = draw(2, num_blocks, block_size, kv_heads, head_dim)
    cells.flatten(1, 2)[:, batch.kv_slots.long()] = torch.nan
    cells = cells.to(FP8) if is_fp8 else cells
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), MAX_LEN, "cuda")
    weights = torch.rand(2, head_dim, device="cuda").to(torch.bfloat16) + 0.5
    norm = HeadNorm(weights[0], weights[1], 1e-6) if with_norm else None
    scales = KvScales(0.75, 2.0) if is_fp8 else KvScales()

    def attend(step: Batch, own_qkv: Tensor, cache: Tensor) -> Tensor:
        found = decode_attention(own_qkv, LayerCache(cache), step, table, norm, kv_scales=scales)
        torch.cuda.synchronize()  # older keys are read before the wait: the next step begins when this one has ended
        return found

    alone, together = cells.clone(), cells.clone()
    expected = torch.cat([attend(one_row(batch, row), qkv[row : row + 1], alone) for row in range(rows)])
    found = attend(batch, qkv, together)
    assert expected.any(dim=1).all()
    assert torch.equal(found, expected)
    assert torch.equal(together.view(torch.uint8), alone.view(torch.uint8))


def join_rows(batch: Batch, count: int) -> None:
    """Let the first rows be one text's: the first row's slot, whose tokens are those of the last."""
    last = int(batch.row_slots[count - 1])
    slot = int(batch.row_slots[0])
    batch.tokens[slot] = batch.tokens[last]
    batch.row_slots[:count] = slot


@pytest.mark.parametrize("kind", [KINDS[0], UNIQUE], ids=["object", "unique"])
@pytest.mark.parametrize("wrong_from", [None, 0, 2], ids=str)
def test_one_warp_moves_an_automaton_on_by_all_rows_of_its_text(kind: Automaton, wrong_from: int | None) -> None:
    """Rows of a text, then an unconstrained row, then another text's; drafts may be what the form does not allow."""
    drafts = 4
    text = text_tokens(b'{"a": [[[{"b":') if kind is KINDS[0] else text_tokens(b"[10,2,3")
    first = len(text) - drafts
    if wrong_from is not None:
        text[first + wrong_from] = text_tokens(b"%")[0]
    begun = [text[:end] for end in range(first, len(text) + 1)]
    kinds = [kind] * len(begun) + [None, KINDS[4]]
    batch = make_constrained(VOCABULARY, kinds, [text[:first]] * len(begun) + [BEGUN[2], BEGUN[4]], most_drafts=drafts)
    for row, tokens in enumerate(begun):
        end = NUM_PROMPT + len(tokens)
        batch.tokens[int(batch.row_slots[row]), NUM_PROMPT:end] = torch.tensor(tokens, dtype=torch.int32)
        batch.context_lens[row] = end
    join_rows(batch, len(begun))
    found = move(batch, torch.device("cuda"))
    allowed = constraint.find_allowed(found, len(kinds), len(VOCABULARY))
    for row, automaton in enumerate(kinds):
        bits, may_end = None, False
        if automaton is not None:
            bits, may_end = list_allowed(batch, int(batch.row_slots[row]), int(batch.context_lens[row]))
        at = int(allowed.lists[row])
        assert (at < 0, bool(allowed.may_end[row])) == (bits is None, may_end)
        assert bits is None or allowed.bits[at].tolist() == bits.tolist()
    assert found.automaton_places.tolist() == batch.automaton_places.tolist()
