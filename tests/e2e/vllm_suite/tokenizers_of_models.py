# SPDX-License-Identifier: Apache-2.0
"""Two tokenizers for the tests of all models: of a model that a server runs that of the default model, which it is.

Of any other: the words of Blink's own tests, and the marks of every format.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer

from blink.models.weights.files import default_model_path
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.reasoning_formats import REASONING_FORMATS
from make_tokenizer import FOLDER

# What models' tokenizers have as one token: a mark between angle or square brackets, without spaces.
_MARK = re.compile(r"<[^<>\s=\"]+>|\[[A-Z_/]+\]")
SERVED: set[str] = set()  # names under which servers run the default model
_MORE = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def find(name: str = "", *_: object, tokenizer_name: str = "", **__: object) -> Any:
    """Return the tokenizer of a model."""
    return read_default() if {name, tokenizer_name} & SERVED else _build()


@cache
def read_default() -> Any:
    """Return the default model's tokenizer, as transformers reads it."""
    path = default_model_path()
    return transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def detokenize_one(
    *, tokenizer: Any, all_input_ids: list[int], prev_tokens: list[str] | None, read_offset: int, **_: object
) -> tuple[list[str], str, int, int]:
    """Return the last token, the text that it completes, and two places that the next call gives back."""
    tokens = tokenizer.convert_ids_to_tokens(all_input_ids if prev_tokens is None else all_input_ids[-1:])
    before, after = (tokenizer.decode(ids) for ids in (all_input_ids[:read_offset], all_input_ids))
    if after.endswith("\ufffd"):  # a character whose other bytes follow
        return tokens, "", 0, read_offset
    return tokens, after[len(before) :], 0, len(all_input_ids)


@cache
def _build() -> Any:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    marks = {mark for form in CALL_FORMATS.values() for text in _texts(form) for mark in _MARK.findall(text)}
    for form in REASONING_FORMATS.values():
        marks |= {mark for text in (*form.opens, *form.closes, *form.ends) for mark in _MARK.findall(text)}
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted({*marks, *_MORE})])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _texts(form: Any) -> list[str]:
    return [*form.opens, *form.closes, *form.between, *form.heads, form.begin, form.end, form.prefix, form.suffix]
