# SPDX-License-Identifier: Apache-2.0
"""Rows behind which a draft head guesses: those of a padded bucket on a GPU do what the CPU's own rows do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from blink.config import ModelConfig
from blink.engine.guessing import make_drafter
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu import sampling as cpu_sampling
from blink.kernels.cpu.guesses import CpuGuesses
from blink.kernels.guesses import RESTS_UNTIL, TEXT_LENGTH, HeadTokens, count_blocks
from blink.kernels.layer_cache import LayerCache
from blink.kernels.rotary import make_rotary_table
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.models.layers import Attention
from blink.models.mtp import MtpHead
from blink.models.rope import Rope
from blink.models.weights.eagle_loader import load_eagle
from blink.models.weights.mtp_loader import load_mtp
from eagle_heads import draw_head, write_clockwork, write_head
from model_driver import Driver, load_decoder, set_params
from model_families import save_model
from mtp_layers import add_mtp, draw_mtp
from triton_interpreter import IS_INTERPRETED

gpu = pytest.importorskip("blink.kernels.gpu.guesses")

MAX_LEN, VOCAB, NUM_BLOCKS = 96, 500, 64
GUESSES = 4
on_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="CUDA C++")
ATTENTION = Attention(heads=4, kv_heads=2, head_dim=32, rope=Rope(theta=1e4, rotary_dim=32))
SIZE = (ATTENTION.heads + 2 * ATTENTION.kv_heads) * ATTENTION.head_dim


class Text(NamedTuple):
    """A slot's part of a step."""

    first: int  # position of its first token
    length: int  # tokens: of a chunk, or each in a row of its own
    num_prompt: int  # tokens of its prompt
    kept: int | None = None  # drafts that are sampled; None: the row is a chunk
    rests_until: int = 0
    sample: int = 7  # of a row whose logits are no numbers: -1


MIXED = [
    Text(16, 1, 5, kept=0),
    Text(31, 4, 9, kept=3),  # all drafts are kept, over a block's border
    Text(40, 4, 9, kept=1),
    Text(12, 16, 3, kept=0),  # none of as many as there may be
    Text(15, 16, 3, kept=15),
    Text(20, 1, 4, kept=0, rests_until=23),  # one token too early
    Text(20, 1, 4, kept=0, rests_until=22),
    Text(33, 1, 4, kept=0, sample=-1),
    Text(0, 5, 5),  # a whole prompt
    Text(7, 9, 16),  # its last chunk, which fills a block
    Text(0, 9, 30),  # a chunk of one that goes on
    Text(8, 8, 17),  # all but one token
]


def make_step(texts: Sequence[Text], block_size: int, padding: tuple[int, int]) -> tuple[Batch, int, int]:
    """Return a sampled step, and its tokens and rows; beyond them are so many padding tokens and rows."""
    draw = torch.Generator().manual_seed(len(texts) + block_size)
    rows = [
        (slot, text.first + at * (text.kept is not None), 1 if text.kept is not None else text.length)
        for slot, text in enumerate(texts)
        for at in range(text.length if text.kept is not None else 1)
    ]
    num_tokens = sum(count for _, _, count in rows)
    batch = Batch.allocate(
        max_tokens=num_tokens + padding[0],
        max_rows=len(rows) + padding[1],
        num_slots=len(texts),
        max_blocks=MAX_LEN // block_size,
        max_model_len=MAX_LEN,
        has_draft_head=True,
    )
    order = torch.randperm(NUM_BLOCKS, generator=draw).to(torch.int32)
    batch.block_tables.copy_(order.repeat(len(texts))[: batch.block_tables.numel()].view(batch.block_tables.shape))
    batch.tokens.copy_(torch.randint(1, VOCAB, batch.tokens.shape, generator=draw))
    batch.kv_slots.fill_(-1)
    batch.query_starts.fill_(num_tokens)
    at = 0
    for row, (slot, first, count) in enumerate(rows):
        span = slice(at, at + count)
        batch.positions[span] = torch.arange(first, first + count)
        batch.input_ids[span] = batch.tokens[slot, first : first + count]
        batch.query_starts[row], batch.row_slots[row], batch.context_lens[row] = at, slot, first + count
        batch.sampled_tokens[row] = sample_of(texts[slot], batch.tokens[slot], first + count)
        at += count
    for slot, text in enumerate(texts):
        batch.params[slot, Param.NUM_PROMPT_TOKENS] = text.num_prompt
        batch.head_drafts[slot, RESTS_UNTIL] = text.rests_until
    for word, value in ((Header.NUM_ROWS, len(rows)), (Header.NUM_TOKENS, num_tokens)):
        batch.header[word] = value
    return batch, num_tokens, len(rows)


def sample_of(text: Text, tokens: torch.Tensor, end: int) -> int:
    """Return what a row that ends before `end` samples: the draft that follows, as far as that is kept."""
    if text.sample < 0 or text.kept is None:
        return text.sample
    follows = int(tokens[end])
    return follows if end - text.first <= text.kept else follows % VOCAB + 1


@pytest.mark.parametrize(("block_size", "num_drafts"), [(32, 2), (16, 3), (8, 15), (16, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (21, 5)], ids=["full", "padded"])
@pytest.mark.parametrize("texts", [MIXED, MIXED[:1], MIXED[5:6]], ids=["mixed", "one", "none"])
def test_rows_of_a_bucket_are_guessed_behind_as_on_a_cpu(
    device: torch.device, block_size: int, num_drafts: int, padding: tuple[int, int], texts: list[Text]
) -> None:
    batch, num_tokens, num_rows = make_step(texts, block_size, padding)
    draw = torch.Generator().manual_seed(3)
    cells = torch.randn(2, NUM_BLOCKS, block_size, ATTENTION.kv_heads, ATTENTION.head_dim, generator=draw)
    bucket = num_tokens + padding[0], num_rows + padding[1]
    own = dataclasses.replace(
        batch, **{one.name: getattr(batch, one.name).to(device, copy=True) for one in dataclasses.fields(Batch)}
    )
    guessed = find_guessed(texts, batch, num_rows)
    spare = bucket[1] * count_blocks(num_drafts, block_size)
    wide = torch.cat((cells, torch.zeros(2, spare, *cells.shape[2:])), dim=1).to(device)
    table = make_rotary_table(ATTENTION.rope.frequencies(), MAX_LEN + num_drafts, "cpu")
    queries = torch.randn(num_drafts, bucket[1], SIZE, generator=draw)
    drafts = torch.randint(0, VOCAB, (bucket[1], num_drafts), generator=draw)

    found = gpu.GpuGuesses(own, bucket, num_drafts, ATTENTION, torch.float32)
    found.open(LayerCache(wide))
    last = queries[0, :, : ATTENTION.q_size].unflatten(1, (ATTENTION.heads, -1)).contiguous()
    attended_last = found.attend_last(last.to(device)).cpu()
    places = [found.positions(guess).cpu() for guess in range(1, num_drafts)]
    turns = [table.index_select(0, each.clamp(0, len(table) - 1)) for each in places]
    attended = [
        found.attend(guess, queries[guess].to(device), turn.to(device)).cpu() for guess, turn in enumerate(turns, 1)
    ]
    found.write(drafts.to(device))

    expected = CpuGuesses(batch, (num_tokens, num_rows), num_drafts, ATTENTION, torch.float32)
    assert found.next_ids[:num_tokens].tolist() == expected.next_ids.tolist()
    assert int(found.next_ids.min()) >= 0 and int(found.next_ids.max()) <= VOCAB
    assert found.ends[guessed].tolist() == expected.ends.tolist() and len(found.ends) == bucket[1]
    assert attended_last.any(dim=1).nonzero().flatten().tolist() == guessed
    if guessed:
        expected.open(LayerCache(cells.clone()))
        known = expected.attend_last(last[guessed])
        torch.testing.assert_close(attended_last[guessed], known, atol=2e-5, rtol=2e-5)
    for guess, (place, turn, result) in enumerate(zip(places, turns, attended, strict=True), 1):
        assert result.any(dim=1).nonzero().flatten().tolist() == guessed
        if guessed:
            assert place[guessed].tolist() == expected.positions(guess).tolist()
            known = expected.attend(guess, queries[guess][guessed], turn[guessed])
            torch.testing.assert_close(result[guessed], known, atol=2e-5, rtol=2e-5)
    assert torch.equal(wide[:, :NUM_BLOCKS].cpu(), cells)
    assert int(found.step.header[Header.NUM_TOKENS]) == num_rows
    if guessed:
        expected.write(drafts[guessed])
    assert torch.equal(own.head_drafts.cpu(), batch.head_drafts)
    assert (batch.head_drafts[:, RESTS_UNTIL + 1] > 0).sum() == len(guessed)


@pytest.mark.parametrize("own", [None, HeadTokens(torch.arange(1, VOCAB, 3), VOCAB)], ids=["all tokens", "some"])
def test_guesses_are_sampled_as_on_a_cpu(
    device: torch.device, own: HeadTokens | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no GPU is, the CPU's sampler takes the rows that the GPU's is given."""
    if device.type == "cpu":
        monkeypatch.setattr(gpu, "sample", lambda logits, batch, rows, **_: cpu_sampling.sample(logits, batch, rows))
    batch, num_tokens, num_rows = make_step(MIXED, 16, (21, 5))
    for slot, text in enumerate(MIXED):
        chosen: dict[Param, float] = {Param.NUM_PROMPT_TOKENS: text.num_prompt, Param.SEED_LOW: 7 * slot + 1}
        chosen |= {Param.TEMPERATURE: (0.0, 1.0, 5.0)[slot % 3], Param.TOP_K: 40 * (slot % 2)}
        set_params(batch, slot, chosen)
    moved = {one.name: getattr(batch, one.name).to(device, copy=True) for one in dataclasses.fields(Batch)}
    mine, bucket = dataclasses.replace(batch, **moved), (num_tokens + 21, num_rows + 5)
    theirs = None if own is None else own._replace(tokens=own.tokens.to(device))
    found = gpu.GpuGuesses(mine, bucket, GUESSES, ATTENTION, torch.float32)
    expected = CpuGuesses(batch, (num_tokens, num_rows), GUESSES, ATTENTION, torch.float32)
    guessed, draw = find_guessed(MIXED, batch, num_rows), torch.Generator().manual_seed(1)
    for guess in range(GUESSES):
        logits = torch.randn(bucket[1], VOCAB if own is None else len(own.tokens), generator=draw)
        sampled = found.sample(guess, logits.to(device), theirs).cpu()
        assert sampled[guessed].tolist() == expected.sample(guess, logits[guessed], own).tolist()
        assert len({*sampled[guessed].tolist()}) > 2 and 0 <= int(sampled.min()) <= int(sampled.max()) < VOCAB
    assert torch.equal(mine.params.cpu(), batch.params)


def find_guessed(texts: Sequence[Text], batch: Batch, num_rows: int) -> list[int]:
    """Return the rows behind which tokens are guessed, by what the texts say of themselves."""
    found: list[int] = []
    for row in range(num_rows):
        text, end = texts[int(batch.row_slots[row])], int(batch.context_lens[row])
        is_last = end == text.first + (text.length if text.kept is None else 1 + text.kept)
        if is_last and text.sample >= 0 and end >= text.num_prompt and end + 1 >= text.rests_until:
            found.append(row)
    return found


@on_gpu
def test_a_head_drafts_on_a_gpu_what_it_does_on_a_cpu(device: torch.device, tmp_path: Path) -> None:
    """A head of random weights in float32, over chunks of prompts and blocks' borders."""
    target, folder = write_clockwork(tmp_path, VOCAB, range(0, VOCAB, 2))
    write_head(folder, draw_head(VOCAB, range(0, VOCAB, 2), seed=4), (0, 1, 1))
    heads = [load_decoder(target, each, torch.float32) for each in ("cpu", str(device))]
    compare(*(drive(decoder, load_eagle(str(folder), decoder)) for decoder in heads))


@on_gpu
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_draft_layer_drafts_on_a_gpu_what_it_does_on_a_cpu(device: torch.device, tmp_path: Path, name: str) -> None:
    """Random weights: an MLP or experts behind attention with gates, norms of heads and a part that is rotated."""
    save_model(name, tmp_path)
    add_mtp(tmp_path, draw_mtp(tmp_path, seed=12))
    config = ModelConfig(model=str(tmp_path))
    layers = [load_decoder(tmp_path, each, torch.float32) for each in ("cpu", str(device))]
    compare(*(drive(decoder, load_mtp(config, decoder)) for decoder in layers))


def compare(cpu: Driver, own: Driver) -> None:
    """Compare what is drafted behind texts as they are computed in chunks and go on."""
    assert own.decoder.head is not None
    own.runner.drafter = make_drafter(own.decoder, own.decoder.head, GUESSES, gpu.GpuGuesses)
    num_drafted, found = 0, cpu.batch.head_drafts
    for _ in range(8):
        for driver in (cpu, own):
            driver.step(max_chunk=7)
        found = own.batch.head_drafts.cpu()
        assert torch.equal(found, cpu.batch.head_drafts)
        num_drafted += int((found[:, TEXT_LENGTH] > 0).sum())
    assert [one.tokens for one in own.sequences] == [one.tokens for one in cpu.sequences]
    assert num_drafted > 12 and len({tuple(row) for row in found[:, TEXT_LENGTH:].tolist()}) > 3


def drive(decoder: Decoder, head: EagleHead | MtpHead) -> Driver:
    """Return a driver of a model with a head, and three texts in it."""
    decoder.kv_dtype = decoder.dtype  # on a CPU too
    decoder.add_head(head, 8 * count_blocks(GUESSES, 16))
    driver = Driver(decoder, max_len=96)
    driver.runner.drafter = make_drafter(decoder, head, GUESSES)
    for length in (1, 12, 23):
        driver.add([(7 * at + length) % decoder.spec.vocab_size for at in range(length)], 40)
    return driver
