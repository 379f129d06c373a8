# SPDX-License-Identifier: Apache-2.0
"""The benchmark whose model writes given texts: what a step samples and guesses is what the texts have."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blink.kernels.batch import Batch, Header
from blink.kernels.guesses import FIRST_GUESS, TEXT_LENGTH
from model_driver import set_params

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXTS = [[0, 21, 22, 23, 24, 25, 26], [1, 31, 32, 33, 34]]
VOCAB = 40


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("scripted_engine")


@pytest.fixture
def batch() -> Batch:
    """Two slots, the second text in the first of them."""
    made = Batch.allocate(max_tokens=4, max_rows=4, num_slots=2, max_blocks=1, max_model_len=16, has_draft_head=True)
    for slot in range(2):
        set_params(made, slot, {})
        made.tokens[slot, 0] = 1 - slot
    return made


def test_rows_sample_what_their_texts_have(scripted: ModuleType, batch: Batch) -> None:
    """Rows of one slot follow each other; behind a text's end there is nothing to say."""
    prompter = scripted.Prompter(scripted.Script(TEXTS), "cpu")
    batch.row_slots[:4] = torch.tensor([0, 1, 1, 0])
    batch.context_lens[:4] = torch.tensor([3, 2, 3, 5])
    batch.header[Header.NUM_ROWS] = 4
    prompter.sample(torch.zeros(4, VOCAB), batch, 4)
    assert batch.sampled_tokens.tolist() == [33, 22, 23, 0]


def test_a_head_is_right_as_often_as_its_shares_say(scripted: ModuleType, batch: Batch) -> None:
    length, shares = 5000, (0.7, 0.5, 0.2)
    text = [1, *(2 * at for at in range(1, length))]
    prompter = scripted.Prompter(scripted.Script([[0], text], shares), "cpu")
    right = torch.zeros(3)
    for at in range(1, length - 3):
        batch.head_drafts[0, TEXT_LENGTH] = at
        prompter.guess(batch)
        found = batch.head_drafts[0, FIRST_GUESS : FIRST_GUESS + 3].tolist()
        matches = [one == other for one, other in zip(found, text[at : at + 3], strict=True)]
        assert matches == sorted(matches, reverse=True), "a draft behind a wrong one is wrong"
        right += torch.tensor(matches)
    assert (right / (length - 4)).tolist() == pytest.approx(shares, abs=0.03)
