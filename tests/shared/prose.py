# SPDX-License-Identifier: Apache-2.0
"""Twenty different prompts of 5 to 600 tokens: pieces of this project's own prose."""

from __future__ import annotations

from pathlib import Path

from blink.config import FrontendConfig
from blink.text.assets import load_assets

LENGTHS = [5, 8, 13, 16, 17, 31, 32, 33, 47, 64, 65, 100, 128, 160, 200, 255, 256, 300, 450, 600]


def read_prompts() -> list[list[int]]:
    """Return the prompts as token ids of the default model."""
    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text() + (root / "LICENSE").read_text()
    tokens = load_assets(FrontendConfig()).tokenizer.encode(text, add_special_tokens=False)
    return [tokens[97 * i : 97 * i + length] for i, length in enumerate(LENGTHS)]
