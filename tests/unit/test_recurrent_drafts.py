# SPDX-License-Identifier: Apache-2.0
"""Rows that verify drafts on recurrent layers: bit for bit what tokens give one after the other, wherever it is cut."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import delta_rule, mamba
from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.layer_cache import StateCache
from blink.kernels.mamba import MambaProjections, MambaWeights
from blink.kernels.recurrent import Advance, Rows
from blink.models.cache_layout import PerSequence

TOKENS, SLOTS, CHANNELS, WIDTH = 120, 3, 96, 32
STATE = (4, 16, 8)  # heads, numbers of a key, of a value


class Kind(NamedTuple):
    """A kind of layers, with random weights."""

    advance: Advance
    weights: Any
    gates: int

    def project(self, tokens: int) -> Any:
        """Return random projections."""
        return self.weights.project(torch.randn(tokens, CHANNELS + WIDTH), torch.randn(tokens, self.gates))

    def make_cache(self, num_drafts: int) -> StateCache:
        """Return slots full of NaN."""
        shapes = PerSequence(state=STATE, inputs=(4, CHANNELS), gates=self.gates, rollback=num_drafts).kept
        return StateCache(*(torch.full((SLOTS, *shape), torch.nan) for shape in (STATE, *shapes)))


def make_kind(name: str) -> Kind:
    torch.manual_seed(8)
    if name == "delta":
        weights = DeltaWeights(torch.randn(4, CHANNELS), -torch.rand(4), torch.randn(4), torch.rand(8), 1e-6, 2, 16)
        return Kind(delta_rule.advance, weights, 8)
    vectors = -torch.rand(4), torch.randn(4), torch.randn(4), torch.rand(32)
    return Kind(mamba.advance, MambaWeights(torch.randn(4, 96), torch.randn(96), *vectors, 1e-6, 2, 16), 4)


class Text:
    """A sequence in a slot: its projections, and what plain decoding makes of them."""

    def __init__(self, kind: Kind, slot: int, prompt: int) -> None:
        """Compute the prompt, then all other tokens one by one."""
        self.slot, self.prompt, self.x = slot, prompt, kind.project(TOKENS)
        cache = kind.make_cache(0)
        self.outputs, self.states = list[Tensor](), dict[int, Tensor]()
        for first, end in [(0, prompt), *((at, at + 1) for at in range(prompt, TOKENS))]:
            rows = Rows(torch.tensor([slot]), torch.tensor([first]), torch.tensor([0, end - first]))
            self.outputs += kind.advance(self.x.take(slice(first, end)), cache, rows, kind.weights)
            self.states[end] = cache.states[slot].clone()
        self.position, self.lag = prompt, 0


def join(parts: list[Any]) -> Any:
    return type(parts[0])(*(torch.cat(each) for each in zip(*parts, strict=True)))


@pytest.mark.parametrize("num_drafts", [1, 3, 15])
@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_drafts_cut_anywhere_leave_what_plain_decoding_does(name: str, num_drafts: int) -> None:
    kind, chance = make_kind(name), random.Random(num_drafts)
    cache, texts = kind.make_cache(num_drafts), [Text(kind, 1, 1), Text(kind, 2, 5), Text(kind, 0, 20)]
    for text in texts:
        rows = Rows(torch.tensor([text.slot]), torch.tensor([0]), torch.tensor([0, text.prompt]), torch.tensor([0]))
        kind.advance(text.x.take(slice(0, text.prompt)), cache, rows, kind.weights)
    cuts = set[tuple[int, int]]()
    while texts := [text for text in texts if text.position < TOKENS]:
        parts, slots, positions, lags, checks = list[Any](), list[int](), list[int](), list[int](), list[Any]()
        for text in texts:
            drafts = min(chance.choice((0, 1, num_drafts)), TOKENS - 1 - text.position)
            right = chance.choice((0, drafts, chance.randint(0, drafts)))
            parts += [text.x.take(slice(text.position, text.position + 1 + right)), kind.project(drafts - right)]
            checks.append((text, len(slots), right))
            slots += [text.slot] * (1 + drafts)
            positions += range(text.position, text.position + 1 + drafts)
            lags += [text.lag, *[0] * drafts]
            cuts.add((drafts, right))
        starts = torch.arange(len(slots) + 1)
        rows = Rows(torch.tensor(slots), torch.tensor(positions), starts, torch.tensor(lags))
        out = kind.advance(join(parts), cache, rows, kind.weights)
        for text, first, right in checks:
            expected = torch.stack(text.outputs[text.position : text.position + 1 + right])
            assert torch.equal(out[first : first + 1 + right], expected), (text.position, right)
            assert torch.equal(cache.states[text.slot], text.states[text.position + 1])
            text.position, text.lag = text.position + 1 + right, right
    assert cuts >= {(0, 0), (1, 0), (1, 1), (num_drafts, 0), (num_drafts, num_drafts)}


def test_gates_are_kept_as_they_are_projected() -> None:
    b, a, dt = torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 4)
    nothing = torch.zeros(3, 0)
    assert torch.equal(Projections(nothing, nothing, b, a).gates, torch.cat((b, a), 1))
    assert torch.equal(MambaProjections(nothing, nothing, dt).gates, dt)


def test_what_a_slot_keeps_grows_by_two_tokens_for_each_draft() -> None:
    layer = PerSequence(state=STATE, inputs=(4, CHANNELS), gates=8)
    drafting = replace(layer, rollback=3)
    assert layer.kept == ((4, CHANNELS), (0, 0)) and drafting.kept == ((10, CHANNELS), (10, 8))
    assert layer.count_bytes(2) == 4 * 16 * 8 * 4 + 4 * CHANNELS * 2
    assert drafting.count_bytes(2) == 4 * 16 * 8 * 4 + 10 * (CHANNELS + 8) * 2
