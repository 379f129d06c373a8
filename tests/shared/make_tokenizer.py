# SPDX-License-Identifier: Apache-2.0
"""Make the small tokenizer of the tests: byte-level BPE of the repository's licence, with the tokens of ChatML.

    .venv/bin/python tests/shared/make_tokenizer.py

It writes the files of tests/shared/tokenizer, which are committed. Ids 0 to 2 are those of the default model's tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "tokenizer"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 1024

_LICENCE = Path(__file__).parents[2] / "LICENSE"
_TALK = """Hello there, world! Hi. The capital of France is Paris. One fish, two fish, red fish, blue fish.
user assistant system tool <think>No.</think>
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}
</tool_call>
def main() -> None:\n    return print("Grüße, 中文, é, 👩")
"""
_TEMPLATE = """\
{%- if messages[0].role != "system" %}{{ "<|im_start|>system\\nYou are a small model.<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer anew: the result is the same each time."""
    tokenizer = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_LICENCE.read_text().splitlines(keepends=True), *[_TALK] * 4], trainer)
    return tokenizer


def make_files() -> dict[str, str]:
    """Return the text of each file by its name."""
    end = SPECIAL.index("<|im_end|>")
    config: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": end}
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return {
        "tokenizer.json": train_tokenizer().to_str() + "\n",
        "tokenizer_config.json": json.dumps({**named, "chat_template": _TEMPLATE}, indent=2) + "\n",
        "config.json": json.dumps(config, indent=2) + "\n",
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (FOLDER / name).write_text(text)
