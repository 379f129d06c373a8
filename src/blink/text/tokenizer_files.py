# SPDX-License-Identifier: Apache-2.0
"""The tokens that a model directory names next to its tokenizer.json, read as transformers does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.weights.text_files import read_json

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_DIGITS = 10  # more than any token id has
_LISTS = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """What the files say, apart from tokenizer.json."""

    roles: dict[str, AddedToken] = field(default_factory=dict[str, AddedToken])  # by names such as bos_token
    others: list[AddedToken] = field(default_factory=list[AddedToken])  # special ones without a role
    added: list[AddedToken] = field(default_factory=list[AddedToken])  # in the order of their ids

    @property
    def texts(self) -> dict[str, str]:
        """Return the special tokens that a chat template may name."""
        return {role: token.content for role, token in self.roles.items()}


def read_named_tokens(path: Path) -> NamedTokens:
    """Read tokenizer_config.json and, unless that lists the added tokens itself, two older files.

    Raises:
        ConfigError: a file is broken.
    """
    file = path / "tokenizer_config.json"
    values = _read_json(file)
    config, named = Fields(values, str(file)), NamedTokens()
    _add_special(named, values, str(file))
    if config.has("added_tokens_decoder"):
        entries, place = config.mapping("added_tokens_decoder"), f"{file}: added_tokens_decoder"
        for key in sorted(entries, key=lambda key: _id(key, place)):
            named.added.append(_token_of(entries[key], place))
        return named
    file = path / "special_tokens_map.json"
    _add_special(named, _read_json(file), str(file))
    special = {token.content for token in (*named.roles.values(), *named.others)}
    file = path / "added_tokens.json"
    values = _read_json(file)
    ids = Fields(values, str(file))
    for text in sorted(values, key=lambda name: ids.integer(name, low=0)):
        named.added.append(AddedToken(text, special=text in special, normalized=text not in special))
    return named


def add_named_tokens(backend: Backend, named: NamedTokens) -> None:
    """Let a tokenizer know the tokens that its own file has not; ids follow those that it has."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    added = [token for token in named.added if repr(token) not in known]
    texts = {token.content for token in (*backend.get_added_tokens_decoder().values(), *added)}
    for token in added:
        token.special = token.special or token.content in named.texts.values()
    for token in (*named.roles.values(), *named.others):
        if token.content not in texts:
            texts.add(token.content)
            added.append(token)
    backend.add_tokens(added)


def _add_special(named: NamedTokens, values: Mapping[str, Any], place: str) -> None:
    """Note the special tokens of a file; it replaces what was said of a role before."""
    lists = [values[name] for name in _LISTS if values.get(name)]
    roles = {name: value for name, value in values.items() if _is_role(name, value)}
    for entry in lists:
        if isinstance(entry, dict):
            roles |= entry
        else:
            named.others.extend(_token_of(token, place, special=True) for token in _items(entry, place))
    for name, value in roles.items():
        named.roles[name] = _token_of(value, f"{place}: {name}", special=True)


def _is_role(name: str, value: object) -> bool:
    """Say whether a field is a special token: those of images and the like have names of their own."""
    return value not in (None, "") and (name in _ROLES or (name.endswith("_token") and isinstance(value, str | dict)))


def _token_of(entry: object, place: str, *, special: bool = False) -> AddedToken:
    values = {"content": entry} if isinstance(entry, str) else entry
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: a token must be a string or an object, but is {show(entry)}.")
    fields = Fields(values, place)
    special = special or fields.flag("special")
    flags = {name: fields.flag(name) for name in ("single_word", "lstrip", "rstrip")}
    normalized = fields.flag("normalized", not special)
    return AddedToken(fields.text("content"), special=special, normalized=normalized, **flags)


def _items(entry: object, place: str) -> Iterable[object]:
    if not isinstance(entry, list):
        raise ConfigError(f"{place}: special tokens must be a list or an object, but are {show(entry)}.")
    return entry


def _id(key: str, place: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > _MAX_DIGITS:
        raise ConfigError(f"{place}: {show(key)} is not a token id.")
    return int(key)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
