# SPDX-License-Identifier: Apache-2.0
"""Which files of a repository Blink reads: never pickles, nor what another program keeps next to them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from blink.errors import ConfigError
from blink.hub.name import is_inside
from blink.models.weights.text_files import TEMPLATE_FOLDER, TEXT_FILES

INDEX: Final = "model.safetensors.index.json"
_CONFIG_FILES: Final = frozenset({"config.json", "chat_template.json", *TEXT_FILES})
_TEMPLATES: Final = re.compile(rf"{TEMPLATE_FOLDER}/[^/]+\.jinja")
_OTHER_LAYOUT: Final = re.compile(r"consolidated.*\.safetensors")
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NO_MODEL: Final = re.compile(r"(?:.*/)?(?:mmproj|imatrix)[^/]*", re.IGNORECASE)
_LABEL: Final = re.compile(r"[-._/]((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MX\w+|BF16|F16|F32))(?=[-./]|$)", re.IGNORECASE)
_DEFAULT_LABEL: Final = "Q4_K_M"
_SHOWN: Final = 20


def usable(names: Iterable[str]) -> list[str]:
    """Return the names that stay inside of the folder that they are put into, in order."""
    return sorted(name for name in names if is_inside(name))


def choose_descriptions(names: Collection[str]) -> list[str]:
    """Return the files that describe a model and its tokenizer."""
    return [name for name in names if name in _CONFIG_FILES or _TEMPLATES.fullmatch(name)]


def choose_weights(names: Collection[str]) -> list[str]:
    """Return the safetensors files where no index names them."""
    if "model.safetensors" in names:
        return ["model.safetensors"]
    return [n for n in names if n.endswith(".safetensors") and "/" not in n and not _OTHER_LAYOUT.fullmatch(n)]


def choose_gguf(names: Collection[str], label: str, place: str) -> list[str]:
    """Return the GGUF file that a label names, all parts of it in order; without a label the usual one, or the first.

    Raises:
        ConfigError: there is none, or a part is missing.
    """
    files = [name for name in names if name.endswith(".gguf") and not _NO_MODEL.fullmatch(name)]
    models: dict[str, list[str]] = {}
    for name in files:
        part = _PART.fullmatch(name)
        models.setdefault(part[1] if part else name.removesuffix(".gguf"), []).append(name)
    fitting = _fitting(models, label or _DEFAULT_LABEL)
    if not fitting and label:
        raise ConfigError(f"{place} has no GGUF file {label!r}; {_describe(models)}")
    parts = models[min(fitting or models, key=lambda stem: (len(stem), stem) if fitting else (0, stem))]
    first = _PART.fullmatch(parts[0])
    if first and (int(first[2]) != 1 or len(parts) != int(first[3])):
        raise ConfigError(f"{place}: {parts[0]} is one of {int(first[3])} parts, of which {len(parts)} are there.")
    return parts


def _fitting(models: Collection[str], label: str) -> list[str]:
    wanted = label.removesuffix(".gguf").lower()
    pattern = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}(?:[-./].*)?")
    return [stem for stem in models if pattern.fullmatch(stem.lower())]


def _describe(models: Collection[str]) -> str:
    labels = sorted({match[1] for stem in models for match in [*_LABEL.finditer(stem)][-1:]})
    if not labels:
        return "it has no GGUF files"
    return "it has " + ", ".join(labels[:_SHOWN]) + ("" if len(labels) <= _SHOWN else ", ...")
