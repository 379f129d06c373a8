# SPDX-License-Identifier: Apache-2.0
"""Command-line flags made from the dataclasses of `blink.config`, and back from a config to flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from blink.config import ModelConfig

Config = TypeVar("Config")

# As in vLLM: lower-case suffixes are decimal, upper-case ones binary.
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_INTEGER = re.compile(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)")
_METAVARS = {int: "N", float: "X"}


def add_flags(parser: argparse.ArgumentParser, config_class: type, texts: Mapping[str, str] | None = None) -> None:
    """Add one flag per field of a config dataclass, nested ones flattened; fields of one name share one flag.

    `texts` replaces the help of fields whose default the command itself chooses.
    A flag that is not given leaves no attribute in the namespace, so that `build_config` keeps the field's default.
    """
    seen: set[str] = set()
    groups: dict[type, argparse._ArgumentGroup] = {}
    if any(owner is ModelConfig for owner, _ in _walk(config_class)):
        _add_positional_model(parser)
    for owner, option in _walk(config_class):
        if option.name in seen:
            continue
        seen.add(option.name)
        if owner not in groups:
            title = owner.__name__.removesuffix("Config").lower()
            groups[owner] = parser.add_argument_group(title, owner.__doc__)
        _add_flag(groups[owner], owner, option, (texts or {}).get(option.name) or _describe(option))


def build_config(config_class: type[Config], namespace: argparse.Namespace) -> Config:
    """Build the config from parsed flags."""
    given = vars(namespace)
    hints = _types_of(config_class)
    values: dict[str, Any] = {}
    for option in _fields(config_class):
        if is_dataclass(hints[option.name]):
            values[option.name] = build_config(hints[option.name], namespace)
        elif option.name in given:
            value = given[option.name]
            values[option.name] = tuple(cast("list[str]", value)) if isinstance(value, list) else value
    return config_class(**values)


def to_flags(config: object) -> list[str]:
    """List the flags that rebuild `config`: those whose value is not the default."""
    flags: list[str] = []
    for option in _fields(type(config)):
        value = getattr(config, option.name)
        if is_dataclass(value):
            flags += to_flags(value)
        elif value == option.default:
            continue
        elif isinstance(value, bool):
            flags.append(_flag(option.name) if value else _flag(f"no_{option.name}"))
        else:
            values = cast("tuple[str, ...]", value) if isinstance(value, tuple) else (value,)
            flags += [f"{_flag(_flag_name(option))}={item}" for item in values]
    return flags


def parse_integer(text: str) -> int:
    """Parse an integer with an optional suffix: 4k is 4000, 4K is 4096, 1.5G is 1610612736."""
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (suffixes k, m, g are decimal; K, M, G binary)")
    factor = FACTORS.get(match[2], 1)
    scaled = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if scaled != int(scaled):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(scaled)


class _StoreOnce(argparse.Action):
    """Store a value, and refuse a second one: MODEL and --model are two spellings of one thing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del option_string
        if getattr(namespace, self.dest, values) != values:
            parser.error(f"{self.dest} is given twice: {getattr(namespace, self.dest)} and {values}")
        setattr(namespace, self.dest, values)


def _walk(config_class: type) -> Iterator[tuple[type, Field[Any]]]:
    """Yield (owning dataclass, field) of all leaves."""
    hints = _types_of(config_class)
    for option in _fields(config_class):
        if is_dataclass(hints[option.name]):
            yield from _walk(cast("type", hints[option.name]))
        else:
            yield config_class, option


def _add_positional_model(parser: argparse.ArgumentParser) -> None:
    text = next(option for option in _fields(ModelConfig) if option.name == "model").metadata["help"]
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", action=_StoreOnce, default=argparse.SUPPRESS, help=f"{text}; also --model"
    )


def _add_flag(group: argparse._ArgumentGroup, owner: type, option: Field[Any], text: str) -> None:
    kind = _types_of(owner)[option.name]
    flag = _flag(_flag_name(option))
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    repeatable = kind not in (str, int, float)
    store = _StoreOnce if option.name == "model" else "store"
    group.add_argument(
        flag,
        dest=option.name,
        default=argparse.SUPPRESS,
        action="append" if repeatable else store,
        type=_parser_of(kind, option.metadata.get("words", {})),
        choices=option.metadata.get("choices"),
        metavar=None if "choices" in option.metadata else option.metadata.get("metavar", _METAVARS.get(kind, "TEXT")),
        help=text,
    )


def _parser_of(kind: type, words: Mapping[str, int]) -> Callable[[str], Any]:
    """Return what reads a value; words: those that stand for a number."""
    plain = {int: parse_integer, float: float}.get(kind, str)
    return (lambda text: words[text] if text in words else plain(text)) if words else plain


def _describe(option: Field[Any]) -> str:
    """Give the help text, with the default where it says something: what empty and 0 mean is in the text itself."""
    text = str(option.metadata["help"]).replace("%", "%%")
    default = option.default
    if isinstance(default, bool):
        return f"{text} (default: {'on' if default else 'off'})"
    if default in ("", 0, ()):
        return text
    shown = ", ".join(cast("tuple[str, ...]", default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})"


@cache
def _types_of(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class)  # which compiles each annotation


def _fields(config_class: type) -> tuple[Field[Any], ...]:
    return fields(cast("Any", config_class))


def _flag_name(option: Field[Any]) -> str:
    return option.metadata.get("flag", option.name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
