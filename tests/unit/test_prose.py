# SPDX-License-Identifier: Apache-2.0
"""The documentation is plain English: short sentences, short pages, the field's words and none of our own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doc_pages import ROOT, count_words, list_pages, list_sentences, name_of, without_code

MAX_SENTENCE, MAX_PAGE = 30, 1500

# Pages that are not yet written anew.
PENDING: set[str] = set()
# Tables made of the flags' declarations: a row for each flag, to be searched and not read.
GENERATED = {"flags.md", "from-vllm.md"}

# What a reader of the field does not know, and the word to write.
PHRASES = {
    r"\bbeside\b": "next to, with, besides",
    r"\bbehind\b": "after, below",
    r"\bso many\b": "the number: N",
    r"\bplanes?\b": "hi/lo FP8 activations; control path, token path",
    r"\bmultiprocessors?\b": "SM",
    r"(?<!dot )\bproducts?\b": "GEMM, matmul",
    r"(?<!\bin )(?<!\btakes )(?<!\btake )\bplaces?\b": "index, offset, position, slot",
    r"\brooms?\b": "capacity, space",
    r"\b\w*quantis\w*": "quantize",
}
# What a reader of the field searches for.
FIELD_WORDS = [
    "prefill", "decode", "continuous batching", "chunked prefill", "KV cache", "prefix cache", "paged", "SM", "GEMM",
    "GEMV", "tile config", "epilogue", "split-K", "token bitmask", "CUDA graph", "TTFT", "TPOT", "logprobs", "RDMA",
    "tensor core", "PDL", "TMA", "back-pressure", "top_p", "best-effort", "latency-sensitive", "autotun",
]  # fmt: skip

_ALL = [*list_pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_PAGES = [page for page in _ALL if name_of(page) not in PENDING]

each_page = pytest.mark.parametrize("page", _PAGES, ids=name_of)


def list_phrases(text: str) -> list[str]:
    """Return the phrases of our own in a page, outside of code."""
    plain = " ".join(without_code(text).split())
    return [match[0] for phrase in PHRASES for match in re.finditer(phrase, plain, re.IGNORECASE)]


@each_page
def test_no_sentence_is_long(page: Path) -> None:
    long = [sentence for sentence in list_sentences(page.read_text()) if count_words(sentence) > MAX_SENTENCE]
    assert long == []


@each_page
def test_no_phrase_of_our_own_stands_in_a_page(page: Path) -> None:
    assert list_phrases(page.read_text()) == []


def test_the_readme_fits_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [page for page in _PAGES if name_of(page) not in GENERATED], ids=name_of)
def test_no_page_is_long(page: Path) -> None:
    assert count_words(without_code(page.read_text())) < MAX_PAGE


def test_the_words_of_the_field_occur() -> None:
    text = " ".join(" ".join(page.read_text() for page in list_pages()).split())
    assert [word for word in FIELD_WORDS if not re.search(rf"\b{word}", text, re.IGNORECASE)] == []


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It takes 1.5 ms, e.g. on an H100. vLLM does not.", ["It takes 1.5 ms, e.g. on an H100.", "vLLM does not."]),
        ("As Sheng et al. (2024).\n\nJ. Smith vs. K. Jones.", ["As Sheng et al. (2024).", "J. Smith vs. K. Jones."]),
        ("(A whole one.) \"And this.\" **Bold.** End.", ["(A whole one.", '"And this.', "**Bold.", "End."]),
        ("Steps 1 ... 3 run; then: it ends.", ["Steps 1 ... 3 run; then: it ends."]),
        ("# A title. Of two\nText\ngoes on.\n\n| a. b | c |\n|---|---|\n", ["Text goes on."]),
        ("Do:\n\n1. A\n   b\n2. Then\n- too\n> quoted\n> on", ["Do:", "A b", "Then", "too", "quoted on"]),
        ("Run `a. b c`, `` `d ``.\n\n```sh\nls. Now\n```\nDone.", ["Run CODE, CODE.", "Done."]),
        ("  ```c\n  a. b\n  ```\n<!-- a. b -->\nSee [a page](x.md#y) <br> ![A. B](p.svg) now", ["See a page now"]),
        ("See https://a.b/c.d?e=f. Or <https://g.h>.", ["See ADDRESS.", "Or ADDRESS."]),
        ("!!! note\n    One.\n\n---\n\n[x]: http://a.b\n", ["One."]),
    ],
)  # fmt: skip
def test_sentences_are_found(text: str, sentences: list[str]) -> None:
    assert [" ".join(one.split()) for one in list_sentences(text)] == sentences


def test_words_are_counted_without_signs() -> None:
    assert count_words("a - b · c/d | 8 % **e** -- `f`") == 6


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It runs beside a server, Behind\nit.", ["beside", "Behind"]),
        ("So\nmany", ["So many"]),
        ("so many places, in place, takes place of the products", ["so many", "products", "places"]),
        ("`beside`\n```\nbehind\n```\nbesides: production, a dot product", []),
        ("| a plane | rooms |\n# Quantised, dequantising", ["plane", "rooms", "Quantised", "dequantising"]),
    ],
)
def test_phrases_are_found_outside_of_code(text: str, found: list[str]) -> None:
    assert sorted(list_phrases(text)) == sorted(found)
