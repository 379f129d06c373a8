# SPDX-License-Identifier: Apache-2.0
"""The files beside tokenizer.json, against transformers' reading of the same directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from blink.config import FrontendConfig, ModelConfig
from blink.errors import ConfigError
from blink.text.assets import load_assets

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMES = ("<|a|>", "<|b|>", "<|c|>", "<mask>", "<image>", "<known>", "<end>", "x")
TEXT = "y " + " ".join(NAMES) + " z" + "".join(NAMES)


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


CASES: dict[str, dict[str, Any]] = {
    "listed": {"tokenizer_config.json": {"added_tokens_decoder": {"258": token("<|a|>"), "259": token("<|b|>")}}},
    "unsorted, with a gap": {
        "tokenizer_config.json": {"added_tokens_decoder": {"1000": token("<|a|>"), "999": token("<|b|>")}}
    },
    "with flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "258": token("<|a|>", lstrip=True, special=False),
                "259": token("<|b|>", rstrip=True),
                "260": token("x", single_word=True, special=False, normalized=True),
            }
        }
    },
    "known, now special": {"tokenizer_config.json": {"added_tokens_decoder": {"256": token("<known>")}}},
    "named special": {
        "tokenizer_config.json": {
            "eos_token": "<|b|>",
            "added_tokens_decoder": {"258": token("<|b|>", special=False, lstrip=True)},
        }
    },
    "named only": {
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", **token("x")},
            "mask_token": "<mask>",
            "pad_token": None,
            "image_token": "<image>",
            "additional_special_tokens": ["<|c|>"],
            "add_bos_token": False,
        }
    },
    "a dictionary": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>", "c": "<|c|>"}}},
    "older": {
        "tokenizer_config.json": {"eos_token": "<|b|>"},
        "added_tokens.json": {"<|a|>": 259, "<|b|>": 258, "<known>": 256},
    },
    "the map": {
        "tokenizer_config.json": {"bos_token": "<known>"},
        "special_tokens_map.json": {
            "bos_token": "<end>",
            "cls_token": token("<|a|>", lstrip=True),
            "additional_special_tokens": ["<|c|>", "x"],
        },
    },
    "the map alone": {
        "special_tokens_map.json": {"bos_token": "<end>", "eos_token": "<end>"},
        "added_tokens.json": {"<|c|>": 258},
    },
    "a list makes the older files void": {
        "tokenizer_config.json": {"added_tokens_decoder": {"258": token("<|c|>")}},
        "special_tokens_map.json": {"bos_token": "<end>"},
        "added_tokens.json": {"<|a|>": 259},
    },
}


def write(folder: Path, files: dict[str, Any]) -> str:
    """Write a model directory with a byte-level tokenizer of 258 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<known>", normalized=False)])
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        values = CONFIG | values if name == "tokenizer_config.json" else values
        (folder / name).write_text(json.dumps(values))
    return str(folder)


def load(path: str, template: str = "{{ messages[0].content }}") -> Any:
    (Path(path) / "config.json").write_text("{}")
    (Path(path) / "chat_template.jinja").write_text(template)
    return load_assets(FrontendConfig(model=ModelConfig(model=path)))


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = write(tmp_path, CASES[name])
    library = PreTrainedTokenizerFast.from_pretrained(path)
    roles = library.special_tokens_map
    template = "".join(f"[{{{{ {role} }}}}]" for role in roles) + "|{{ messages[0].content }}"
    assets = load(path, template)
    tokens = assets.tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokens == library(TEXT, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert assets.tokenizer.decode(tokens, skip_special_tokens=skip) == library.decode(
            tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "user", "content": "Hi"}]
    assert assets.chat_template is not None
    assert assets.chat_template.render(messages) == "".join(f"[{text}]" for text in roles.values()) + "|Hi"


def test_the_end_token_may_be_named_in_any_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"special_tokens_map.json": {"eos_token": token("<|b|>")}})
    assert load(path).eos_token_ids == (258,)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": token("a")}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 40: token("a")}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"258": 3}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"258": {"content": None}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"258": {"content": "a", "lstrip": "no"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}),
        ("special_tokens_map.json", {"bos_token": ["<s>"]}),
        ("special_tokens_map.json", {"additional_special_tokens": [3]}),
        ("added_tokens.json", {"<a>": "258"}),
        ("added_tokens.json", {"<a>": -1}),
    ],
)
def test_malformed_files_are_refused_by_name(file: str, values: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, {file: values})
    with pytest.raises(ConfigError, match=file) as caught:
        load(path)
    assert "\n" not in str(caught.value)
