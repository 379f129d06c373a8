# SPDX-License-Identifier: Apache-2.0
"""Turn the words of a command line, which may be vLLM's, into Blink's own flags.

Names with underscores, short names, negations, lists, JSON and dotted values, a YAML file of flags and some environment
variables become one form: `--flag=value` or `--flag`, each of them Blink's. `blink/vllm/flags.txt` decides.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from blink.cli.flags import FACTORS
from blink.cli.loading import load
from blink.config import parse_object
from blink.errors import ConfigError
from blink.vllm.table import Flag, load_table

# Where the environment says what no flag says.
_VARIABLES: Final = {"VLLM_LOGGING_LEVEL": "--log-level", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--keep-alive-timeout"}
_OVERRIDES: Final = "--hf-overrides"
_LEVEL: Final = re.compile(r"-O(=?)([0-3])")
_NUMBER: Final = re.compile(r"-[\d.]+[kmgKMG]?")
_SUFFIX: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


@dataclass(slots=True)
class Given:
    """A flag with its values as somebody wrote it; a word that belongs to no flag has no name."""

    name: str
    values: list[str]
    keys: tuple[str, ...] = ()  # of a dotted name
    shown: str = ""  # as it was written, for messages


@dataclass(slots=True)
class CommandLine:
    """The words that Blink's own parser takes, and what had no effect."""

    words: list[str] = field(default_factory=list[str])
    ignored: list[str] = field(default_factory=list[str])


def translate(words: Sequence[str], own: Mapping[str, argparse.Action]) -> CommandLine:
    """Return the command line in Blink's own flags, which `own` holds by name.

    Raises:
        ConfigError: a flag is unknown, or asks for something that Blink does not do.
    """
    reader = _Reader(own)
    given = list(reader.read(list(words)))
    _check_lists(given)
    files = [item.values[0] for item in given if item.name == "--config" and item.values]
    named = {item.name for item in given if not item.keys}
    named |= {"--model"} & {"--model" if not item.name else "" for item in given}
    below = chain.from_iterable(reader.read(load("blink.cli.config_file").read_words(path)) for path in files)
    beneath = [item for item in below if (item.name or "--model") not in named]
    named |= {item.name for item in beneath}
    for variable, name in _VARIABLES.items():
        if os.environ.get(variable) and name in own and name not in named:
            beneath.append(Given(name, [os.environ[variable]]))
    return _Writer(own).write(_join_keys([*beneath, *given]))


class _Reader:
    """Finds the flags among words, each under its long name."""

    def __init__(self, own: Mapping[str, argparse.Action]) -> None:
        self._own = own
        self._table = load_table()
        self._switches = {name for name, action in own.items() if action.nargs == 0}
        negations = ((other, flag.name) for flag in self._table.values() for other in flag.negations)
        self._negations = {other: name for other, name in negations if other not in self._table and other not in own}

    def read(self, words: list[str]) -> Iterator[Given]:
        """Yield flags with their values, and words that belong to none."""
        words = words[::-1]
        while words:
            word = words.pop()
            if word == "--":
                yield from (Given("", [rest]) for rest in words[::-1])
                return
            if level := _LEVEL.fullmatch(word):
                yield Given("--optimization-level", [level[2]], shown=word)
            elif word == "-O" and words and words[-1] in "0123":
                yield Given("--optimization-level", [words.pop()], shown="-O")
            elif word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word):
                yield self._read_flag(word, words)
            else:
                yield Given("", [word])

    def _read_flag(self, word: str, words: list[str]) -> Given:
        shown, has_value, value = word.partition("=")
        base, *keys = shown.split(".")
        name = "--" + base[2:].replace("_", "-") if base.startswith("--") else base
        flag = self._table.get(name)
        if flag is not None and name not in self._own:
            name = flag.name
        if name in self._negations and not has_value:
            return Given(self._negations[name], ["off"], shown=shown)
        if name not in self._own and flag is None:
            raise ConfigError(self._describe_unknown(shown, name))
        if keys:
            return Given(name, [value if has_value else _take(words, shown)], tuple(keys), shown)
        if name in self._switches or (flag is not None and flag.is_switch):
            if has_value:
                raise ConfigError(f"{shown} takes no value: give {shown} or {_negate(name)}")
            return Given(name, [], shown=shown)
        if has_value:
            return Given(name, [value], shown=shown)
        if flag is not None and flag.kind in ("list", "optional"):
            limit = len(words) if flag.kind == "list" else 1
            return Given(name, _take_all(words, limit), shown=shown)
        return Given(name, [_take(words, shown)], shown=shown)

    def _describe_unknown(self, shown: str, name: str) -> str:
        known = [*self._own, *(flag.name for flag in self._table.values()), *self._negations]
        near = difflib.get_close_matches(name, dict.fromkeys(known), 1)
        return f"unrecognized flag {shown}" + (f"; did you mean {near[0]}?" if near else "")


class _Writer:
    """Writes flags as Blink's own parser takes them."""

    def __init__(self, own: Mapping[str, argparse.Action]) -> None:
        self._own = own
        self._table = load_table()
        self._result = CommandLine()
        self._overrides: dict[str, Any] = {}

    def write(self, given: Iterable[Given]) -> CommandLine:
        """Return the command line.

        Raises:
            ConfigError: a value asks for something that Blink does not do.
        """
        for item in given:
            flag = self._table.get(item.name)
            if not item.name:
                self._result.words += item.values
            elif flag is None:
                self._pass_on(item.name, item)
            elif flag.action == "same":
                self._pass_same(flag, item)
            elif flag.action == "alias":
                self._pass_on(flag.words[0], Given(item.name, [*map(flag.to_own, item.values)], shown=item.shown))
            elif flag.action == "override":
                self._overrides[flag.words[0]] = _read_value(item.values[-1])
            elif flag.action != "config":
                self._decide(flag, item)
        if self._overrides:
            self._result.words.append(f"{_OVERRIDES}={json.dumps(self._overrides)}")
        return self._result

    def _pass_same(self, flag: Flag, item: Given) -> None:
        if flag.kind == "texts":
            item.values = list(chain.from_iterable(_read_texts(flag, value) for value in item.values))
        if flag.name == _OVERRIDES:
            self._overrides = parse_object(flag.name[2:], item.values[-1]) | self._overrides
        elif not flag.is_switch:
            values = [flag.to_own(value) for value in item.values]
            self._pass_on(flag.name, Given(item.name, values, shown=item.shown))
        else:
            self._pass_on(flag.name, item)

    def _pass_on(self, name: str, item: Given) -> None:
        action = self._own.get(name)
        if action is None:
            raise ConfigError(f"{item.shown or name} is no flag of this command: give it to `blink serve`")
        if action.nargs == 0:
            self._result.words.append(_negate(name) if item.values else name)
        else:
            self._result.words += [f"{name}={value}" for value in item.values]

    def _decide(self, flag: Flag, item: Given) -> None:
        """Take a flag that Blink does not have, or refuse its value."""
        values = item.values or (["on"] if flag.is_switch else [])
        for value in values:
            flag.check(value)
        if flag.action == "quiet":
            self._result.ignored.append(f"{item.shown or flag.name} ({flag.reason})")


def _check_lists(given: list[Given]) -> None:
    """Refuse a list that may have taken MODEL for one of its words."""
    if not any(item.name in ("", "--model", "--config") for item in given):
        for item in given:
            if item.name in ("--api-key", "--served-model-name") and len(item.values) > 1:
                raise ConfigError(f"{item.shown} takes all words behind it, and MODEL is not given: put MODEL first")


def _join_keys(given: list[Given]) -> Iterator[Given]:
    """Make one JSON object of the dotted values of a flag, and of its own value."""
    dotted = {item.name for item in given if item.keys}
    objects: dict[str, dict[str, Any]] = {}
    for item in given:
        if item.name not in dotted:
            yield item
            continue
        whole = objects.setdefault(item.name, {})
        if not item.keys:
            whole.update(parse_object(item.name[2:], item.values[-1]))
            continue
        *path, last = item.keys
        for key in path:
            inner = whole.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{item.shown}: {key} has a value already")
            whole = inner
        is_list = last.endswith("+")
        whole[last.rstrip("+")] = item.values[0].split(",") if is_list else _read_value(item.values[0])
    yield from (Given(name, [json.dumps(values)], shown=name) for name, values in objects.items())


def _read_value(text: str) -> Any:
    """Return what a value is in JSON, or a number with a suffix, or else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if (match := _SUFFIX.fullmatch(text)) is None:
        return text
    return int(float(match[1]) * FACTORS[match[2]])


def _read_texts(flag: Flag, value: str) -> list[str]:
    found = _read_value(value)
    if isinstance(found, list) and all(isinstance(text, str) for text in found):
        return found
    if value.lstrip().startswith(("[", "{")):
        raise ConfigError(f"{flag.name} must be a JSON list of texts, or one text, got {value}")
    return [value]


def _take(words: list[str], shown: str) -> str:
    if not words or not _is_value(words[-1]):
        raise ConfigError(f"{shown} needs a value")
    return words.pop()


def _take_all(words: list[str], limit: int) -> list[str]:
    taken: list[str] = []
    while words and len(taken) < limit and _is_value(words[-1]):
        taken.append(words.pop())
    return taken


def _is_value(word: str) -> bool:
    return word == "-" or not word.startswith("-") or bool(_NUMBER.fullmatch(word)) or " " in word


def _negate(name: str) -> str:
    return f"--no-{name[2:]}"
