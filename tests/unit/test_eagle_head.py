# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: what they draft is what a plain computation over the whole text gives, however the text came."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import Tensor

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.formats.base import plain
from blink.kernels.batch import Batch, Header, Param
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.models.weights.eagle_loader import load_eagle
from blink.plan.site import Bucket
from blink.runner.eagle import EagleDrafter
from blink.runner.run import Runner
from blink.speculation import read_speculation
from eagle_heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, draw_head, write_head
from model_driver import load, set_params
from tiny_model import write_tiny_model

VOCAB, LAYERS, DRAFTS, BLOCK = 128, 5, 4, 8
READ = (1, 2, 4)  # layers
TOKENS = [*range(1, VOCAB, 3)]
TEXT = [5, 60, 17, 33, 80, 4, 9, 9, 100, 3, 2, 71, 70, 69, 68, 1, 44, 45, 46, 90]


@pytest.fixture
def target(tmp_path: Path) -> Decoder:
    path = write_tiny_model(tmp_path / "model", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    return load(path, load_format="dummy", max_model_len=64, dtype="float32")


def head_of(folder: Path, **changes: bool) -> Path:
    return write_head(folder, draw_head(VOCAB, TOKENS, seed=3), READ, **changes)


class Play:
    """One sequence of a model with a head, whose rows a test chooses; the KV cache is of blocks in no order."""

    def __init__(self, target: Decoder, folder: Path) -> None:
        target.add_head(load_eagle(str(folder), target))
        assert isinstance(target.head, EagleHead)
        self.runner = Runner(target)
        self.drafter = self.runner.drafter = EagleDrafter(target, target.head, DRAFTS)
        self.batch = Batch.allocate(
            max_tokens=64, max_rows=16, num_slots=3, max_blocks=8, max_model_len=64, has_draft_head=True
        )
        self.cache = target.allocate_kv_cache(24, BLOCK, 3)
        self.batch.block_tables[:] = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(3, 8)
        self.residuals: dict[tuple[int, int], dict[int, Tensor]] = {}  # of a slot's position, by layer
        self._keep, self.drafter.keep = self.drafter.keep, self.keep

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Note residuals as the model's layers begin, whichever the head reads."""
        starts = batch.query_starts[: int(batch.header[Header.NUM_ROWS]) + 1].diff()
        slots = batch.row_slots[: len(starts)].repeat_interleave(starts).tolist()
        for at, (slot, position) in enumerate(zip(slots, batch.positions.tolist(), strict=False)):
            self.residuals.setdefault((slot, position), {})[layer] = residual[at].clone()
        self._keep(batch, layer, residual)

    def begin(self, slot: int, prompt: list[int]) -> None:
        set_params(self.batch, slot, {Param.NUM_PROMPT_TOKENS: len(prompt)})
        self.batch.tokens[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)

    def step(self, *rows: tuple[int, int, list[int]], **kinds: bool) -> list[int]:
        """Compute rows of (slot, position of the first token, tokens); return what each samples."""
        self.runner.forward(self.batch, self.cache, Bucket(self.compose(*rows), len(rows), **kinds))
        return self.batch.sampled_tokens[: len(rows)].tolist()

    def compose(self, *rows: tuple[int, int, list[int]]) -> int:
        """Describe rows to the model; return the number of their tokens."""
        batch, at = self.batch, 0
        for row, (slot, start, tokens) in enumerate(rows):
            for position, token in enumerate(tokens, start):
                batch.input_ids[at], batch.positions[at] = token, position
                batch.kv_slots[at] = batch.block_tables[slot, position // BLOCK] * BLOCK + position % BLOCK
                at += 1
            batch.query_starts[row + 1], batch.row_slots[row] = at, slot
            batch.context_lens[row] = start + len(tokens)
        batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = len(rows), at
        batch.header[Header.NUM_DECODE_ROWS] = sum(len(tokens) == 1 for _, _, tokens in rows)
        return at

    def draft(self, slot: int) -> tuple[int, list[int]]:
        """Return the slot's draft, and the length of the text that it is for."""
        _, num_tokens, count, *tokens = self.batch.head_drafts[slot].tolist()
        return num_tokens, tokens[:count]

    def inputs(self, slot: int, length: int) -> Tensor:
        """Return what the head reads of a slot's first positions [length, 3 * hidden]."""
        kept = [self.residuals[slot, position] for position in range(length)]
        return torch.stack([torch.cat([each[layer] for layer in READ]) for each in kept])


@dataclass
class Reference:
    """The head by plain PyTorch, over a whole text at once."""

    tensors: dict[str, Tensor]
    is_normed: bool

    def draft(self, inputs: Tensor, text: list[int], count: int) -> list[int]:
        """Return the draft behind a text; inputs: of all its tokens but the last."""
        hidden, ids = functional.linear(inputs, self.tensors["fc.weight"]), [*text[1:]]
        found: list[int] = []
        while True:
            out = self._run(hidden, ids)
            logits = functional.linear(self._norm(out[-1], "norm"), self.tensors["lm_head.weight"])
            own = int(logits.argmax())
            found.append(own + int(self.tensors["d2t"][own]))
            if len(found) == count:
                return found
            hidden, ids = torch.cat((hidden, out[-1:])), [*ids, found[-1]]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]

    def _run(self, hidden: Tensor, ids: list[int]) -> Tensor:
        weights = {name.removeprefix("midlayer."): tensor for name, tensor in self.tensors.items()}
        normed = self._norm(hidden, "midlayer.hidden_norm")
        embedded = self._norm(weights["embed_tokens.weight"][ids], "midlayer.input_layernorm")
        pair = torch.cat((embedded, normed), dim=1)
        query, key, value = (
            functional.linear(pair, weights[f"self_attn.{name}_proj.weight"])
            .view(len(ids), -1, HEAD_DIM)
            .transpose(0, 1)
            for name in "qkv"
        )
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (_rotate(key), value))
        scores = _rotate(query) @ key.transpose(1, 2) / HEAD_DIM**0.5
        scores += torch.full_like(scores, -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        residual = (normed if self.is_normed else hidden) + functional.linear(
            attended, weights["self_attn.o_proj.weight"]
        )
        inner = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (functional.linear(inner, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + functional.linear(functional.silu(gate) * up, weights["mlp.down_proj.weight"])


def _rotate(heads: Tensor) -> Tensor:
    """Rotate [heads, positions, dim] by halves, as Llama does."""
    rates = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(heads.shape[1])[:, None] * rates
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def check_drafts(play: Play, reference: Reference, slot: int, text: list[int]) -> None:
    assert play.draft(slot) == (len(text), reference.draft(play.inputs(slot, len(text) - 1), text, DRAFTS))


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("chunk", [20, 7, 1])
def test_a_draft_is_that_of_the_plain_computation(target: Decoder, tmp_path: Path, is_normed: bool, chunk: int) -> None:
    folder = head_of(tmp_path / "head", norm_before_residual=is_normed)
    play, reference = Play(target, folder), Reference(load_file(folder / "model.safetensors"), is_normed)
    play.begin(0, TEXT)
    sampled = [0]
    for start in range(0, len(TEXT), chunk):
        sampled = play.step((0, start, TEXT[start : start + chunk]))
    text = [*TEXT, *sampled]
    check_drafts(play, reference, 0, text)
    for _ in range(9):  # over a block's border
        text += play.step((0, len(text) - 1, text[-1:]))
        check_drafts(play, reference, 0, text)


@pytest.mark.parametrize("accepted", range(4))
def test_a_draft_follows_the_last_accepted_token_of_verify_rows(target: Decoder, tmp_path: Path, accepted: int) -> None:
    folder = head_of(tmp_path / "head")
    play, reference = Play(target, folder), Reference(load_file(folder / "model.safetensors"), False)
    oracle = Play(target, folder)
    text = [*TEXT]
    for each in (play, oracle):
        each.begin(1, TEXT)
        sampled = each.step((1, 0, TEXT))
    text += sampled
    following = list[int]()
    for _ in range(4):
        following += oracle.step((1, len(text) + len(following) - 1, [*text, *following][-1:]))
    draft = [token if at < accepted else (token + 1) % VOCAB for at, token in enumerate(following[:3])]
    play.begin(2, TEXT[:6])  # another sequence's row in the same step
    rows = [(1, len(text) - 1 + at, [token]) for at, token in enumerate([text[-1], *draft])]
    sampled = play.step(*rows, (2, 0, TEXT[:6]))
    text += following[: accepted + 1]
    assert sampled[: accepted + 1] == following[: accepted + 1]
    check_drafts(play, reference, 1, text)
    check_drafts(play, reference, 2, [*TEXT[:6], sampled[-1]])


def test_a_step_in_segments_is_drafted_behind_as_a_whole_one(target: Decoder, tmp_path: Path) -> None:
    """Another step runs between its segments, of which the head keeps the residuals apart."""
    folder = head_of(tmp_path / "head")
    whole, cut = Play(target, folder), Play(target, folder)
    for each in (whole, cut):
        each.begin(0, TEXT)
    sampled = whole.step((0, 0, TEXT))
    other = replace(cut.batch, header=cut.batch.header.clone())
    cut.compose((0, 0, TEXT))
    size, residual = Bucket(len(TEXT), 1, decoding=False), torch.zeros(64, HIDDEN)
    for layers in (range(2), range(2, 4), range(4, LAYERS)):
        cut.runner.forward_segment(cut.batch, cut.cache, size, layers, residual)
        cut.drafter.keep(other, READ[0], torch.zeros(1, HIDDEN))
    assert cut.batch.sampled_tokens[:1].tolist() == sampled and cut.draft(0) == whole.draft(0)


def test_while_the_scheduler_takes_no_draft_none_is_made(target: Decoder, tmp_path: Path) -> None:
    folder = head_of(tmp_path / "head")
    play, reference = Play(target, folder), Reference(load_file(folder / "model.safetensors"), False)
    play.begin(0, TEXT)
    play.batch.head_drafts[0, 0] = len(TEXT) + 3
    text = [*TEXT, *play.step((0, 0, TEXT))]
    for wanted in (False, False, True, True):
        assert (play.draft(0)[0] == len(text)) == wanted
        if wanted:
            check_drafts(play, reference, 0, text)
        text += play.step((0, len(text) - 1, text[-1:]))


def test_a_prompt_that_goes_on_has_no_draft_yet(target: Decoder, tmp_path: Path) -> None:
    play = Play(target, head_of(tmp_path / "head"))
    play.begin(0, TEXT)
    play.step((0, 0, TEXT[:9]))
    assert play.draft(0) == (0, [])


def test_the_head_reads_residuals_as_layers_begin(target: Decoder, tmp_path: Path) -> None:
    """That of layer 0 is the embedding; that of layer n is what a model of n layers ends with."""
    play = Play(target, write_head(tmp_path / "head", draw_head(VOCAB, TOKENS, seed=3), (0, 2, 4)))
    play.begin(0, TEXT)
    play.step((0, 0, TEXT))
    found = [play.residuals[0, position] for position in range(len(TEXT))]
    assert torch.equal(torch.stack([each[0] for each in found]), plain(target.embedding)[TEXT])
    spec = replace(target.spec, layers=target.spec.layers[:2], drafter=None)
    shorter = Decoder(spec, target.embedding, target.layers[:2], target.norm, target.lm_head)
    ended = Runner(shorter).compute_hidden(play.batch, shorter.allocate_kv_cache(24, BLOCK), len(TEXT), 1)  # its norm
    residual = torch.stack([each[2] for each in found])
    expected = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-5) * plain(target.norm)
    torch.testing.assert_close(ended, expected)


def test_steps_without_guesses_are_read_all_the_same(target: Decoder, tmp_path: Path) -> None:
    folder = head_of(tmp_path / "head")
    play, reference = Play(target, folder), Reference(load_file(folder / "model.safetensors"), False)
    play.begin(0, TEXT)
    text = [*TEXT, *play.step((0, 0, TEXT), skips_guesses=True)]
    for skips in (True, True, False):
        assert play.draft(0) == (0, [])
        text += play.step((0, len(text) - 1, text[-1:]), skips_guesses=skips)
    check_drafts(play, reference, 0, text)


def test_both_forms_of_checkpoints_are_the_same_head(target: Decoder, tmp_path: Path) -> None:
    tensors = draw_head(VOCAB, TOKENS, seed=3)
    first = load_eagle(str(write_head(tmp_path / "eagle", tensors, READ)), target)
    second = load_eagle(str(write_head(tmp_path / "speculators", tensors, READ, by_speculators=True)), target)
    assert first.layers == second.layers == READ and first.tokens.tolist() == second.tokens.tolist() == TOKENS
    for name in ("qkv", "fusion", "output", "lm_head"):
        assert torch.equal(plain(getattr(first, name)).to_dense(), plain(getattr(second, name)).to_dense()), name
    assert first.attention == second.attention


def test_a_head_without_an_embedding_reads_the_models(target: Decoder, tmp_path: Path) -> None:
    tensors = draw_head(VOCAB, TOKENS, seed=3)
    del tensors["embed_tokens.weight"]
    folder = write_head(tmp_path / "head", tensors, READ)
    play = Play(target, folder)
    assert isinstance(target.head, EagleHead) and target.head.embedding is None
    play.begin(0, TEXT)
    text = [*TEXT, *play.step((0, 0, TEXT))]
    check_drafts(play, Reference({**tensors, "embed_tokens.weight": plain(target.embedding)}, False), 0, text)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (HIDDEN, 2 * HIDDEN)),
        ("midlayer.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
        ("midlayer.hidden_norm.weight", (HIDDEN - 1,)),
        ("midlayer.mlp.down_proj.weight", (HIDDEN, 3)),
        ("lm_head.weight", (7, HIDDEN)),
        ("embed_tokens.weight", (VOCAB + 1, HIDDEN)),
        ("d2t", (7,)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_its_name(
    target: Decoder, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    folder = head_of(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(shape, dtype=tensors[name].dtype)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=name.removesuffix(".weight")):
        load_eagle(str(folder), target)


@pytest.mark.parametrize(
    "name", ["fc.weight", "midlayer.self_attn.o_proj.weight", "norm.weight", "lm_head.weight", "d2t"]
)
def test_a_tensor_that_is_missing_is_named(target: Decoder, tmp_path: Path, name: str) -> None:
    folder = head_of(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"no tensor '{name}'|'{name}'"):
        load_eagle(str(folder), target)


def test_tokens_beyond_the_models_vocabulary_are_refused(target: Decoder, tmp_path: Path) -> None:
    folder = head_of(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][-1] = VOCAB
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="'d2t' names tokens beyond"):
        load_eagle(str(folder), target)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 2}, "several layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"hidden_act": "gelu"}, "silu"),
    ],
)
def test_heads_of_other_forms_are_refused(target: Decoder, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    folder = write_head(tmp_path / "head", draw_head(VOCAB, TOKENS, seed=3), READ, **changes)
    with pytest.raises(ConfigError, match=told):
        load_eagle(str(folder), target)


def test_layers_that_the_model_has_not_are_refused(target: Decoder, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", draw_head(VOCAB, TOKENS, seed=3), (1, 2, LAYERS))
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
        load_eagle(str(folder), target)


def test_a_folder_without_a_head_is_refused(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_eagle(str(tmp_path), target)


def test_a_head_is_a_folder() -> None:
    config = json.dumps({"method": "eagle3", "model": "somewhere"})
    found = EngineConfig(speculative_config=config).speculation
    assert (found.head, found.num_tokens) == ("somewhere", 3) and found.ngram_min > found.ngram_max


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"method": "eagle3"}, "needs a model"),
        ({"method": "eagle3", "model": 3}, "needs a model"),
        ({"method": "eagle3", "model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max.*eagle3"),
        ({"method": "eagle3", "model": "x", "num_speculative_tokens": 16}, "between 1 and 15"),
        ({"method": "eagle3", "model": "x", "rejection_sample_method": "synthetic"}, "rejection_sample_method"),
    ],
)
def test_configurations_of_heads_that_are_wrong_are_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_speculation(values)
