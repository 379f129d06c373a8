# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ as a reader meets them: sentences, words, headings and links, without code.

A sentence ends at `.`, `!`, `?` or with its paragraph, list item or quote. A colon or a semicolon ends none. Code,
tables, headings, pictures and addresses are left out; a piece of code in a line counts as one word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<fence>```+|~~~+).*?^[ >]*(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^)\s]+(?:\s+\"[^\"]*\")?\)")
_TARGET = re.compile(r"\]\(\s*([^)\s]+)")
_ADDRESS = re.compile(r"<https?://[^>\s]+>|\bhttps?://[^\s)\]]*[^\s)\].,;:]")
_TAG = re.compile(r"</?[a-zA-Z][^>]*>")
_QUOTE = re.compile(r"^[ \t]*(?:>[ \t]?)+")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
_SKIPPED = re.compile(r"^\s*(?:#{1,6}\s|\||!!!|\?\?\?|\[[^\]]+\]:\s|(?:---+|\*\*\*+)\s*$)")
# A full stop and what closes with it; the next word follows a space.
_END = re.compile(r"(?<=[.!?])[\"'”)\]*_]*\s+")
_ABBREVIATION = re.compile(r"(?:\b(?:(?i:e\.g|i\.e|vs|cf|et al|etc|approx|fig|resp)|[A-Z])|\.\.)\.$")
_WORD = re.compile(r"\w")


def list_pages() -> list[Path]:
    """Return every page of docs/."""
    return sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    """Return a page's path from docs/, or a page's outside of it from the repository."""
    return str(page.relative_to(DOCS if DOCS in page.parents else ROOT))


def without_code(text: str) -> str:
    """Return a page's text without blocks and pieces of code, comments and addresses."""
    text = _COMMENT.sub("", _FENCE.sub("", text))
    text = _CODE.sub("CODE", text)
    return _ADDRESS.sub("ADDRESS", _PICTURE.sub("", text))


def list_blocks(text: str) -> Iterator[str]:
    """Return the paragraphs, items and quotes of a page, each on one line."""
    lines: list[str] = []
    was_quoted = False
    for line in [*_TAG.sub("", _LINK.sub(r"\1", without_code(text))).splitlines(), ""]:
        plain = _QUOTE.sub("", line)
        is_quoted = plain != line
        begins = is_quoted != was_quoted or _ITEM.match(plain) is not None
        if lines and (begins or not plain.strip() or _SKIPPED.match(plain)):
            yield " ".join(lines)
            lines = []
        was_quoted = is_quoted
        if plain.strip() and not _SKIPPED.match(plain):
            lines.append(_ITEM.sub("", plain).strip())


def list_sentences(text: str) -> list[str]:
    """Return the sentences of a page."""
    sentences: list[str] = []
    for block in list_blocks(text):
        begun = ""
        for part in _END.split(block):
            begun = f"{begun} {part}".strip()
            if not _ABBREVIATION.search(begun.rstrip("\"'”)]*_")):
                sentences.append(begun)
                begun = ""
        sentences += [begun] if begun else []
    return [sentence for sentence in sentences if count_words(sentence)]


def count_words(text: str) -> int:
    """Return how many words a text has: signs alone are none."""
    return sum(1 for word in text.split() if _WORD.search(word))


def list_targets(text: str) -> list[str]:
    """Return what a page's links and pictures lead to."""
    return _TARGET.findall(_CODE.sub("CODE", _COMMENT.sub("", _FENCE.sub("", text))))


def list_anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: those that the site and a forge's view of the page agree on."""
    titles = [_LINK.sub(r"\1", title) for title in _HEADING.findall(_COMMENT.sub("", _FENCE.sub("", text)))]
    return {site for title in titles if (site := _site_anchor(title)) == _forge_anchor(title)}


def _site_anchor(title: str) -> str:
    plain = unicodedata.normalize("NFKD", title.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _forge_anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-")
