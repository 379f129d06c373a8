# SPDX-License-Identifier: Apache-2.0
"""The tests' own tokenizer is what its script makes, small, and as sound as the default model's."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from make_tokenizer import FOLDER, SPECIAL, VOCAB_SIZE, make_files
from small_tokenizer import load_small_assets

assets = cache(load_small_assets)


def test_the_files_are_those_that_the_script_makes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == make_files()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 50_000


def test_its_vocabulary_is_full_and_special_tokens_come_first() -> None:
    tokenizer = assets().tokenizer
    assert [tokenizer.token_id(name) for name in SPECIAL] == [0, 1, 2]
    assert set(tokenizer.special_tokens) == {0, 1, 2}
    assert len({tokenizer.token_name(token) for token in range(VOCAB_SIZE)}) == VOCAB_SIZE
    assert not tokenizer.token_name(VOCAB_SIZE)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokens = assets().tokenizer.encode(text, add_special_tokens=False)
    assert assets().tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_words_are_tokens_and_unusual_characters_are_several() -> None:
    sizes = {
        text: len(assets().tokenizer.encode(text, add_special_tokens=False)) for text in (" fish", "12", "👩", "𓀀")
    }
    assert sizes == {" fish": 1, "12": 2, "👩": 3, "𓀀": 4}


def test_a_conversation_is_written_in_chatml_with_a_system_turn() -> None:
    template = assets().chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert assets().eos_token_ids == (assets().tokenizer.token_id("<|im_end|>"),)
