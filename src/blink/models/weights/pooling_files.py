# SPDX-License-Identifier: Apache-2.0
"""Read whether and how a model directory pools: by the options, modules.json and config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from blink.config import ModelConfig, parse_object
from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.families import FAMILIES
from blink.models.pooling import Pooling, PoolingKind
from blink.models.weights.overrides import override
from blink.models.weights.text_files import read_json, read_list

_KINDS: Mapping[str, PoolingKind] = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}
_MODES: Mapping[str, PoolingKind] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
}  # fmt: skip
_CLASSIFIER = "ForSequenceClassification"
_LOGITS = "LogitScore"  # sentence-transformers' module of rerankers that compare two tokens
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}
_POOLING_TYPES, _SWITCHED = ("pooling_type", "seq_pooling_type"), ("normalize", "use_activation")
_TASKS = {"embed": "embed", "classify": "score"}


def read_pooling(path: Path, config: ModelConfig, architecture: str) -> Pooling | None:
    """Return how the model of a path pools; None: it generates.

    Raises:
        ConfigError: the options contradict each other, or it pools in a way that is not done here.
    """
    if config.runner == "generate":
        if config.convert in _TASKS:
            raise ConfigError(f"--convert {config.convert} needs --runner pooling.")
        return None
    if config.runner == "auto" and config.convert == "none":
        return None
    if path.is_file():
        if config.runner == "pooling" or config.convert in _TASKS:
            raise ConfigError(f"--runner pooling: {path} is a GGUF file; give a Hugging Face model directory.")
        return None
    values = override(read_json(path / "config.json"), parse_object("hf_overrides", config.hf_overrides))
    fields, modules = Fields(values, str(path / "config.json")), _read_modules(path)
    task = _TASKS.get(config.convert) or _find_task(fields, modules)
    if task is None and config.runner != "pooling":
        return None
    pooling = _read_score(path, fields, architecture) if task == "score" else _read_embedding(path, modules)
    return _change(pooling, config.pooler_config)


def _find_task(fields: Fields, modules: Mapping[str, Path]) -> str | None:
    """Return what the files say that the model is for; None: text."""
    classes = fields.texts("architectures", [])
    is_classifier = any(name.endswith(_CLASSIFIER) for name in classes)
    if is_classifier or fields.has("classifier_from_token") or _LOGITS in modules:
        return "score"
    return "embed" if modules else None


def _read_modules(path: Path) -> dict[str, Path]:
    """Return the folders of sentence-transformers' modules by the last parts of their types; empty: there are none."""
    file = path / "modules.json"
    if not file.is_file():
        return {}
    found: dict[str, Path] = {}
    for entry in read_list(file):
        fields = Fields(entry, str(file))
        folder = fields.text("path", "")
        if Path(folder).name != folder:
            raise ConfigError(f"{file}: 'path' must name a folder beside it, but is {show(folder)}.")
        found[fields.text("type").rsplit(".", 1)[-1]] = path / folder
    return found


def _read_embedding(path: Path, modules: Mapping[str, Path]) -> Pooling:
    """Read the modules behind the transformer; without any, the last token's state is normalized, as in vLLM."""
    if not modules:
        return Pooling()
    place = Fields({}, str(path / "modules.json"))
    known = ["Transformer", "Pooling", "Normalize"]
    order = [name for name in known if name in modules]
    place.require([*modules] == order and "Pooling" in modules, f"the modules {', '.join(modules)}")
    _check_transformer(modules.get("Transformer", path))
    return Pooling(kind=_read_kind(modules["Pooling"] / "config.json"), normalizes="Normalize" in modules)


def _check_transformer(folder: Path) -> None:
    file = folder / "sentence_bert_config.json"
    fields = Fields(read_json(file) if file.is_file() else {}, str(file))
    fields.require(not fields.flag("do_lower_case"), "do_lower_case")


def _read_kind(file: Path) -> PoolingKind:
    """Return the pooling of sentence-transformers' config: one mode by name, or one of several switches."""
    fields = Fields(read_json(file), str(file))
    if fields.has("pooling_mode"):
        modes = [fields.text("pooling_mode")]
    else:
        modes = [name for name in _SWITCHES if fields.flag(f"pooling_mode_{name}")]
    fields.require(len(modes) == 1 and modes[0] in _MODES, f"pooling by {' and '.join(modes) or 'nothing'}")
    kind = _MODES[modes[0]]
    fields.require(kind == "last" or fields.flag("include_prompt", True), "pooling without the prompt (include_prompt)")
    return kind


_SWITCHES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def _read_score(path: Path, fields: Fields, architecture: str) -> Pooling:
    """Read a reranker: one with a classifier of one output, or one that compares the logits of two tokens."""
    names = FAMILIES[architecture].score_tokens
    fields.require(bool(names), f"a reranker of the family {architecture}")
    if any(name.endswith(_CLASSIFIER) for name in fields.texts("architectures", [])) and not fields.has(
        "classifier_from_token"
    ):
        labels = fields.integer("num_labels", len(fields.mapping("id2label")) or 2)
        fields.require(labels == 1, f"a classifier of {labels} labels")
        return Pooling(scores=True, normalizes=_read_activation(fields))
    names = fields.texts("classifier_from_token", [*names])
    fields.require(len(names) == 2, f"a comparison of {len(names)} tokens (classifier_from_token)")
    first, second = (_find_token(path / "tokenizer.json", name) for name in names)
    return Pooling(scores=True, score_tokens=(first, second))


def _read_activation(fields: Fields) -> bool:
    """Return whether scores go through a sigmoid: by the name of sentence-transformers' function, else they do."""
    own = Fields(fields.mapping("sentence_transformers"), fields.place)
    name = own.text("activation_fn", "Sigmoid").rsplit(".", 1)[-1]
    fields.require(name in _ACTIVATIONS, f"the activation {show(name)}")
    return _ACTIVATIONS[name]


def _find_token(file: Path, name: str) -> int:
    vocabulary = Fields(Fields(read_json(file), str(file)).mapping("model"), str(file), "").mapping("vocab")
    return Fields(vocabulary, str(file)).integer(name, low=0)


def _change(pooling: Pooling, text: str) -> Pooling:
    """Return the pooling with vLLM's --pooler-config over it.

    Raises:
        ConfigError: it asks for what is not done here.
    """
    given = parse_object("pooler_config", text)
    if unknown := [name for name in given if name not in (*_POOLING_TYPES, *_SWITCHED)]:
        raise ConfigError(f"--pooler-config: {unknown[0]} is not supported.")
    fields, kind, normalizes = Fields(given, "--pooler-config"), pooling.kind, pooling.normalizes
    for name in filter(fields.has, _POOLING_TYPES):
        asked = fields.text(name).upper()
        fields.require(asked in _KINDS, f"pooling by {show(asked)}")
        kind = _KINDS[asked]
    for name in filter(fields.has, _SWITCHED):
        normalizes = fields.flag(name)
    fields.require(kind == "last" or not pooling.scores, f"a reranker that pools by {kind}")
    return replace(pooling, kind=kind, normalizes=normalizes)
