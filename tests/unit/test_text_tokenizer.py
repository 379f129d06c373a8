# SPDX-License-Identifier: Apache-2.0
"""The tokenizer built from GGUF metadata, against transformers' for the same file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from blink.config import FrontendConfig, ModelConfig
from blink.errors import BadRequestError, ConfigError
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.text.assets import load_assets
from blink.text.gguf_tokenizer import build_tokenizer
from blink.text.tokenizer import Tokenizer, load_tokenizer
from model_mutations import memory_limit
from small_tokenizer import MISSING, write_hollow_gguf

TEXT = st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=MISSING), max_size=60)
NASTY = [
    "",
    "Hello, world! It's 12345.",
    " 1 2  3",
    "tab\t\t7\r\n\r\n  x",
    "٣٤٥ ½ Ⅻ ¾",
    "中文测试 123。ひらがな",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 é \u00a0\u2003x",
    "a\x00b\x7f\ufeff",
    "<|im_start|>user\nhi<|im_end|><|endoftext|> <file_sep>",
    "def f(x):\n\treturn x**2  # ok\n",
    "don't WE'LL ¡qué! straße İ",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_hollow_gguf(path)
    return path


@pytest.fixture(scope="module")
def small(file: Path) -> Tokenizer:
    return load_assets(FrontendConfig(model=ModelConfig(model=str(file)))).tokenizer


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """transformers' tokenizer of the same file, with the pre-tokenizer of the original model.

    Its GGUF conversion leaves out that SmolLM2 splits digits off: for " 1 2  3" it merges the spaces differently.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize("text", NASTY)
def test_ids_equal_transformers(small: Tokenizer, reference: Any, text: str) -> None:
    assert small.encode(text, add_special_tokens=True) == reference(text)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_equal_transformers_on_any_text(small: Tokenizer, reference: Any, text: str) -> None:
    assert small.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_decoding_gives_the_text_back(small: Tokenizer, text: str) -> None:
    tokens = small.encode(text, add_special_tokens=False)
    assert small.decode(tokens, skip_special_tokens=False) == text


def test_special_tokens_are_one_id_and_can_be_skipped(small: Tokenizer) -> None:
    tokens = small.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert small.decode(tokens, skip_special_tokens=True) == "hi"


def test_lone_surrogates_are_a_bad_request(small: Tokenizer) -> None:
    with pytest.raises(BadRequestError):
        small.encode("a\ud800b", add_special_tokens=False)


def test_metadata_equals_the_gguf_package(file: Path) -> None:
    from gguf import GGUFReader

    ours = read_gguf_metadata(file)
    fields = GGUFReader(file).fields
    theirs = {name: fields[name].contents() for name in fields if not name.startswith("GGUF.")}
    assert ours == theirs


def test_tokenizer_json_of_a_directory_equals_the_gguf(tmp_path: Path) -> None:
    backend = build_tokenizer(metadata("llama-bpe", merges=["h e", "l l", "he ll"]))
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "hello hell 123"
    expected = backend.encode(text).ids
    assert load_tokenizer(tmp_path).encode(text, add_special_tokens=True) == expected


def test_directory_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", b"GGUF" + b"\x03" + b"\0" * 11 + b"\xff" * 16, b"PK\x03\x04" + b"\0" * 60]
)
def test_broken_gguf_is_a_config_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="GGUF"):
        read_gguf_metadata(path)


def metadata(pre: str, merges: list[str] | None = None, **extra: Any) -> dict[str, Any]:
    """A byte-level vocabulary of all bytes, one control token and the results of the merges."""
    merges = merges or []
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", *(merge.replace(" ", "") for merge in merges)]
    kinds = [3 if token == "<s>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234 ok\n\n x", ["it", "'s", " 1234", " ok", "\n\n", " x"]),
        ("smollm", "it's 123 ok", ["it", "'s", " ", "1", "2", "3", " ok"]),
        ("llama-bpe", "IT'S 12345 ok!\n\n x", ["IT", "'S", " ", "123", "45", " ok", "!\n\n", " x"]),
        ("qwen2", "IT'S 123 ok!\n\n x", ["IT", "'S", " ", "1", "2", "3", " ok", "!\n\n", " x"]),
        ("qwen2", "नमस्ते 12", ["नमस", "्त", "े", " ", "1", "2"]),  # vowel signs are marks, no letters
        ("qwen35", "नमस्ते 12!", ["नमस्ते", " ", "1", "2", "!"]),
        ("glm4", "It's 12345 of_x!\n\n", ["It", "'s", " ", "123", "45", " of", "_x", "!\n\n"]),
        (
            "deepseek-v3",
            "ab 1234漢字かな .cd_ef 5+6",
            ["ab", " ", "123", "4", "漢字かな", " .", "cd", "_ef", " ", "5", "+", "6"],
        ),
        ("dbrx", "a.b 12345", ["a", ".b", " ", "123", "45"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
    ],
)
def test_pre_tokenizer_cuts_as_its_family_does(pre: str, text: str, pieces: list[str]) -> None:
    splitter = build_tokenizer(metadata(pre)).pre_tokenizer
    cut = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
    assert cut == pieces


def test_bos_is_added_when_the_file_or_the_family_says_so() -> None:
    def first(**data: Any) -> bool:
        values = metadata(**data)
        ids = Tokenizer(build_tokenizer(values)).encode("a", add_special_tokens=True)
        return ids[0] == values["tokenizer.ggml.bos_token_id"]

    assert not first(pre="gpt-2")
    assert first(pre="gpt-2", add_bos_token=True)
    assert first(pre="llama-bpe")
    assert not first(pre="llama-bpe", add_bos_token=False)


def test_unknown_tokenizers_are_refused_not_guessed() -> None:
    with pytest.raises(ConfigError, match="from-mars"):
        build_tokenizer(metadata("from-mars"))
    with pytest.raises(ConfigError, match="t5"):
        build_tokenizer({**metadata("gpt-2"), "tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": ["a", 3]}, "must be a list of strings"),
        ({"merges": ["ab"]}, "merges 'ab', which are no tokens"),
        ({"merges": ["a c"]}, "merges 'a c', which are no tokens"),
        ({"pre": ["gpt-2"]}, "'tokenizer.ggml.pre' must be a string"),
        ({"token_type": [1.5]}, "must be a list of whole numbers"),
        ({"add_bos_token": True, "bos_token_id": 3}, "must be a whole number from 0 to 2, but is 3"),
    ],
)
def test_malformed_parts_of_a_gguf_tokenizer_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    parts = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **changes}
    with pytest.raises(ConfigError, match=message):
        build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in parts.items()})


def test_a_tokenizer_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    values = json.loads(Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).to_str())
    values["model"]["continuing_subword_prefix"] = "longer than any token"
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)


LETTERS = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789 !")}


def write_tokenizer(folder: Path, **parts: Any) -> Path:
    """Write a tokenizer.json of one token for each letter, with some parts."""
    values = json.loads(Backend(models.BPE(LETTERS, [])).to_str())
    (folder / "tokenizer.json").write_text(json.dumps({**values, **parts}))
    return folder


def replacement(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def normalizers(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


def split(pattern: str) -> dict[str, Any]:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [rule]}}


def around(count: int, ids: int = 1) -> dict[str, Any]:
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    mark = {"SpecialToken": {"id": "m", "type_id": 0}}
    token = {"m": {"id": "m", "ids": [3] * ids, "tokens": ["m"] * ids}}
    rule = {"type": "TemplateProcessing", "single": [mark] * count + [text], "pair": [text, other]}
    return {"post_processor": {**rule, "special_tokens": token}}


EXPLODING: dict[str, dict[str, Any]] = {
    "a letter grows and grows": normalizers(*[replacement({"String": "k"}, "k" * 40)] * 5),
    "a word grows": normalizers(*[replacement({"String": "hello"}, "hello hello" * 9)] * 4),
    "a class of letters grows": normalizers(*[replacement({"Regex": "[\u0430-\u0436]"}, "\u0430" * 50)] * 5),
    "a letter is long": normalizers(replacement({"String": "z"}, "z" * 5000)),
    "a text begins with much": normalizers(*[{"type": "Prepend", "prepend": "b" * 50000}] * 30),
    "a text begins with a novel": normalizers({"type": "Prepend", "prepend": "b" * 500_000}),
    "a pattern tries all ways": split(r"^(\w+)+$"),
    "a pattern tries all ways of words": split("^((ab|cd|abcd)+)+$"),
    "a pattern wants a letter at its end": split(r"(\d+)*z"),
    "a replacement tries all ways": normalizers(replacement({"Regex": "^(x|x?)+$"}, "")),
    "many tokens around a text": around(5000),
    "one mark of many tokens": around(1, ids=5000),
    "a decoder grows": {
        "decoder": {"type": "Sequence", "decoders": [replacement({"String": "e"}, "e" * 30)] * 5}
    },
}  # fmt: skip


@pytest.mark.parametrize("parts", EXPLODING.values(), ids=EXPLODING)
def test_a_tokenizer_that_explodes_is_refused_by_name(tmp_path: Path, parts: dict[str, Any]) -> None:
    write_tokenizer(tmp_path, **parts)
    used = sum(os.times()[:4])
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not used: "), memory_limit(1 << 29):
        load_tokenizer(tmp_path)
    assert sum(os.times()[:4]) - used < 4.0


HONEST: dict[str, dict[str, Any]] = {
    "plain": {},
    "spaces are marked": normalizers(
        {"type": "Prepend", "prepend": "\u2581"}, replacement({"String": " "}, "\u2581"), {"type": "NFKD"}
    ),
    "quotes": normalizers(replacement({"String": "``"}, '"'), {"type": "NFKC"}, {"type": "Lowercase"}),
    "as GPT-4": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "two marks": around(2),
}


@pytest.mark.parametrize("parts", HONEST.values(), ids=HONEST)
def test_usual_rules_are_taken(tmp_path: Path, parts: dict[str, Any]) -> None:
    ids = load_tokenizer(write_tokenizer(tmp_path, **parts)).encode("ab", add_special_tokens=False)
    assert ids[-2:] == [0, 1]


@pytest.mark.parametrize("strategy", [{"Fixed": 400_000_000}, "BatchLongest"])
@pytest.mark.parametrize("multiple", [None, 200_000_000])
def test_padding_and_truncation_are_taken_out(tmp_path: Path, strategy: Any, multiple: int | None) -> None:
    padding = {"strategy": strategy, "direction": "Left", "pad_to_multiple_of": multiple}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Left", "max_length": 2, "strategy": "OnlyFirst", "stride": 0}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, padding=padding, truncation=truncation))
    assert tokenizer.encode("cabbage", add_special_tokens=True) == [LETTERS[letter] for letter in "cabbage"]


def test_a_text_of_which_the_library_panics_is_a_bad_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blink.text.tokenizer.check_tokenizer", lambda *_: None)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, **split("^(q+)+$")))
    with pytest.raises(BadRequestError, match="cannot tokenize this text") as caught:
        tokenizer.encode("q" * 40 + "!", add_special_tokens=False)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "config.json",
    ],
)
def test_a_link_out_of_the_models_directory_is_refused(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    (model / name).parent.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_tokenizer(model)
    secret = tmp_path / "secret"
    secret.write_text((model / name).read_text() if (model / name).exists() else "{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    with pytest.raises(ConfigError, match=f"{name} is a link out of the model's directory"):
        load_assets(FrontendConfig(model=ModelConfig(model=str(model))))
