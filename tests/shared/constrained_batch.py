# SPDX-License-Identifier: Apache-2.0
"""Batches whose rows are constrained: a vocabulary of JSON's fragments, automata, and texts that have begun."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from automata import ItemText, Place, PlainAutomaton
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.kernels.batch import Batch, Header, Param
from blink.region.layout import AUTOMATON_PLACE
from blink.structured_outputs import StructuredOutputsParams

NUM_PROMPT = 3
STOP_TOKEN = 1
_FRAGMENTS = [
    '{"',
    '"}',
    '": ',
    ', "',
    "}}",
    "]]",
    "[[",
    "[{",
    '{"a":',
    "true",
    "fal",
    "null",
    "-1",
    "0.5",
    " ",
    "é",
    "日本",
]


def make_vocabulary(size: int, seed: int = 3) -> list[bytes]:
    """Return tokens: an empty one, a special one, all bytes, fragments, and random strings of printable characters."""
    chance = random.Random(seed)
    tokens = [b"", b"\xff<|end|>", *(bytes([byte]) for byte in range(256)), *(each.encode() for each in _FRAGMENTS)]
    tokens += [b"[" * count for count in range(2, 15)] + [b"]" * count for count in range(2, 15)]
    while len(tokens) < size:
        tokens.append(bytes(chance.randrange(32, 127) for _ in range(chance.randrange(1, 12))))
    return tokens[:size]


def automaton_of(**params: object) -> Automaton:
    return compile_structured(StructuredOutputsParams(**params))  # pyright: ignore[reportArgumentType]


def make_constrained(
    vocabulary: Sequence[bytes],
    automata: Sequence[Automaton | None],
    generated: Sequence[Sequence[int]],
    *,
    most_drafts: int = 0,
) -> Batch:
    """Make a batch of one greedy row per automaton, with the tokens that it has generated; None: unconstrained.

    Of a row with tokens, the place before the last is what a step before would have left. Slots have places for drafts.
    """
    rows = len(automata)
    text = bytearray().join(vocabulary)
    text += b"x" * (-len(text) % 8)  # the fill is no token's
    batch = Batch.allocate(
        max_tokens=1,
        max_rows=rows,
        num_slots=rows + 2,
        max_blocks=1,
        max_model_len=512,
        num_automata=rows,
        vocab_size=len(vocabulary),
        vocab_bytes=len(text),
        most_siblings=most_drafts,
    )
    batch.header[Header.NUM_ROWS] = rows
    batch.token_starts[1:] = torch.tensor([len(token) for token in vocabulary]).cumsum(0)
    batch.token_text.copy_(torch.frombuffer(text, dtype=torch.uint8))
    batch.automaton_places.fill_(-1)
    for row, (automaton, tokens) in enumerate(zip(automata, generated, strict=True)):
        slot = rows + 1 - row
        batch.row_slots[row] = slot
        batch.context_lens[row] = NUM_PROMPT + len(tokens)
        batch.tokens[slot, NUM_PROMPT : NUM_PROMPT + len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
        batch.stop_tokens[slot, 0] = STOP_TOKEN
        for param, value in {
            Param.NUM_PROMPT_TOKENS: NUM_PROMPT,
            Param.NUM_STOP_TOKENS: 1,
            Param.NUM_LOGPROBS: -1,
        }.items():
            batch.params[slot, param] = value
        batch.params_f32[slot, Param.TOP_P] = batch.params_f32[slot, Param.REPETITION_PENALTY] = 1.0
        if automaton is not None:
            batch.params[slot, Param.AUTOMATON] = row + 1
            data = torch.frombuffer(bytearray(automaton.data), dtype=torch.uint8)
            batch.automata[row, : len(data)] = data
            if len(tokens) > 1:
                place = place_behind(automaton, [vocabulary[token] for token in tokens[:-1]])
                _store_place(batch, slot, len(tokens) - 1, place)
    return batch


def place_behind(automaton: Automaton, texts: Sequence[bytes]) -> Place:
    """Return where these tokens lead, by the plain walker."""
    plain = PlainAutomaton(automaton.data)
    place: Place | None = plain.start
    for text in texts:
        assert place is not None
        place = plain.take_token(place, text)
    assert place is not None
    return place


def _store_place(batch: Batch, slot: int, num_generated: int, place: Place) -> None:
    found = np.zeros((), AUTOMATON_PLACE)
    found["num_generated"], found["state"], found["depth"] = num_generated, place.state, len(place.stack)
    found["stack"][: len(place.stack)] = place.stack
    items = place.items
    found["item_depth"], found["num_closed"] = items.depth, len(items.closed)
    found["item_hash"] = _hash_of(items.text) if items.depth else 0
    found["closed"][: len(items.closed)] = [_hash_of(text) for text in sorted(items.closed)]
    found["trail_states"] = 0xFFFF
    for at, state in enumerate(items.trail):
        found["trail_states"][at] = 0xFFFF if state is None else state
        found["trail_hashes"][at] = _hash_of(items.text[: len(items.text) - 1 - at])
    places = batch.automaton_places[slot].view(batch.num_lists, -1)
    places[num_generated % batch.num_lists] = torch.from_numpy(found.reshape(1).view(np.int32))


def _hash_of(text: ItemText) -> int:
    found = 0x811C9DC5
    for symbol in text:
        found = (found ^ symbol) * 0x01000193 & 0xFFFFFFFF
    return found
