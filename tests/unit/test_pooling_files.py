# SPDX-License-Identifier: Apache-2.0
"""Whether and how a directory's model pools: by its files, by options, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.pooling import Pooling
from blink.models.weights.pooling_files import read_pooling

_PART = "sentence_transformers.models."
SCORE = Pooling(scores=True, score_tokens=(3, 4))


def write(
    folder: Path, config: dict[str, Any] | None = None, *modules: str, pooling: dict[str, Any] | None = None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **(config or {})}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 3, "yes": 4, "nein": 5, "ja": 6}}}))
    if modules:
        entries = [{"type": name if "." in name else f"{_PART}{name}", "path": name[:1]} for name in modules]
        (folder / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        (folder / "P").mkdir()
        (folder / "P" / "config.json").write_text(json.dumps(pooling))


def read(folder: Path, **options: Any) -> Pooling | None:
    return read_pooling(folder, ModelConfig(model=str(folder), **options), "qwen3")


LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
EMBEDDER = ("Transformer", "Pooling", "Normalize")
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "options", "expected"),
    [
        ({}, (), None, {}, None),
        ({"architectures": ["Qwen3ForCausalLM"]}, EMBEDDER, LAST, {}, Pooling()),
        ({}, EMBEDDER, LAST, {"runner": "generate"}, None),
        ({}, EMBEDDER, LAST, {"convert": "none"}, None),
        ({}, EMBEDDER[:2], {"pooling_mode_mean_tokens": True}, {}, Pooling(kind="mean", normalizes=False)),
        ({}, EMBEDDER, {"pooling_mode_cls_token": True}, {}, Pooling(kind="cls")),
        ({}, EMBEDDER, {"pooling_mode": "lasttoken"}, {}, Pooling()),
        ({}, EMBEDDER, {"pooling_mode": "mean"}, {}, Pooling(kind="mean")),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"pooling_type": "mean"}'}, Pooling(kind="mean")),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"seq_pooling_type": "CLS"}'}, Pooling(kind="cls")),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"normalize": false}'}, Pooling(normalizes=False)),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"use_activation": false}'}, Pooling(normalizes=False)),
        ({}, (), None, {"runner": "pooling"}, Pooling()),
        ({}, (), None, {"convert": "embed"}, Pooling()),
        ({}, (), None, {"convert": "classify"}, SCORE),
        ({"classifier_from_token": ["nein", "ja"]}, (), None, {}, Pooling(scores=True, score_tokens=(5, 6))),
        ({}, (), None, {"hf_overrides": '{"classifier_from_token": ["no", "yes"]}'}, SCORE),
        ({}, ("Transformer", "a.b.LogitScore"), None, {}, SCORE),
        (CLASSIFIER, (), None, {}, Pooling(scores=True)),
        (CLASSIFIER | {"num_labels": 1, "id2label": {}}, (), None, {}, Pooling(scores=True)),
        (
            CLASSIFIER | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            (), None, {}, Pooling(scores=True, normalizes=False),
        ),
        (CLASSIFIER, (), None, {"pooler_config": '{"use_activation": false}'}, Pooling(scores=True, normalizes=False)),
    ],
)  # fmt: skip
def test_what_a_directory_pools(
    tmp_path: Path,
    config: dict[str, Any],
    modules: tuple[str, ...],
    pooling: dict[str, Any] | None,
    options: dict[str, str],
    expected: Pooling | None,
) -> None:
    write(tmp_path, config, *modules, pooling=pooling)
    assert read(tmp_path, **options) == expected


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "options", "named"),
    [
        ({}, (*EMBEDDER, "Dense"), LAST, {}, "Dense"),
        ({}, ("Pooling", "Transformer"), LAST, {}, "Pooling, Transformer"),
        ({}, ("Transformer", "Normalize"), None, {}, "Transformer, Normalize"),
        ({}, EMBEDDER, {"pooling_mode_max_tokens": True}, {}, "max_tokens"),
        ({}, EMBEDDER, {"pooling_mode_weightedmean_tokens": True}, {}, "weightedmean_tokens"),
        ({}, EMBEDDER, LAST | {"pooling_mode_mean_tokens": True}, {}, "mean_tokens and lasttoken"),
        ({}, EMBEDDER, {}, {}, "nothing"),
        ({}, EMBEDDER, {"pooling_mode_mean_tokens": True, "include_prompt": False}, {}, "include_prompt"),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"pooling_type": "ALL"}'}, "'ALL'"),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"step_tag_id": 3}'}, "step_tag_id"),
        ({}, EMBEDDER, LAST, {"pooler_config": '{"normalize": "yes"}'}, "normalize"),
        ({}, EMBEDDER, LAST, {"pooler_config": "[]"}, "pooler-config"),
        ({}, (), None, {"convert": "classify", "pooler_config": '{"pooling_type": "MEAN"}'}, "mean"),
        ({}, (), None, {"runner": "generate", "convert": "embed"}, "--runner pooling"),
        (CLASSIFIER | {"id2label": {"0": "a", "1": "b"}}, (), None, {}, "2 labels"),
        (CLASSIFIER | {"id2label": None}, (), None, {}, "2 labels"),
        ({"classifier_from_token": ["no"]}, (), None, {}, "classifier_from_token"),
        ({"classifier_from_token": ["no", "maybe"]}, (), None, {}, "maybe"),
        (CLASSIFIER | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, (), None, {}, "Tanh"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(
    tmp_path: Path,
    config: dict[str, Any],
    modules: tuple[str, ...],
    pooling: dict[str, Any] | None,
    options: dict[str, str],
    named: str,
) -> None:
    write(tmp_path, config, *modules, pooling=pooling)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, **options)
    assert named in refused.value.message


def test_a_family_without_rerankers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", **CLASSIFIER})
    with pytest.raises(ConfigError, match="a reranker of the family llama"):
        read_pooling(tmp_path, ModelConfig(), "llama")


def test_a_gguf_file_generates(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert read_pooling(file, ModelConfig(), "qwen3") is None
    with pytest.raises(ConfigError, match="GGUF"):
        read_pooling(file, ModelConfig(runner="pooling"), "qwen3")


@pytest.mark.parametrize("folder", ["../other", "/etc", "a/b"])
def test_a_module_lies_beside_its_list(tmp_path: Path, folder: str) -> None:
    write(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"{_PART}Pooling", "path": folder}]))
    with pytest.raises(ConfigError, match="a folder beside it"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "[", '[{"path": ""}]'])
def test_a_malformed_list_of_modules_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read(tmp_path)


def test_a_transformer_of_lower_case_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {}, *EMBEDDER, pooling=LAST)
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match="do_lower_case"):
        read(tmp_path)
