# SPDX-License-Identifier: Apache-2.0
"""Names of models on the hub: `org/name`, with `:Q4_K_M` for a GGUF file of it and `@v1` for a revision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = re.compile(r"(?:hf://|(?:https?://)?(?:huggingface\.co|hf\.co)/)")
_NAME: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([\w./-]+))?", re.ASCII)
_HUB_RULE: Final = re.compile(r"--|\.\.|\.git$|\.ipynb$|[.-]$")  # what the hub lets no name have


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub."""

    repository: str
    revision: str = ""  # empty: main
    label: str = ""  # which GGUF file: a quantisation's name, or the file's own


def parse_name(text: str) -> HubName | None:
    """Return what a text names on the hub; None if it cannot be a name there."""
    match = _NAME.fullmatch(_PREFIX.sub("", text, count=1) if _PREFIX.match(text) else text)
    if match is None or any(_HUB_RULE.search(part) for part in match[1].split("/")):
        return None
    if match[1].endswith(".gguf") or not is_inside(match[2] or "main") or not is_inside(match[3] or "x"):
        return None
    return HubName(match[1], match[2] or "", match[3] or "")


def is_inside(name: str) -> bool:
    """Say whether a name that the hub gives for a file stays in the folder that it is put into."""
    parts = name.split("/")
    return bool(name) and not any(part in ("", ".", "..") for part in parts) and name.isprintable() and "\\" not in name
