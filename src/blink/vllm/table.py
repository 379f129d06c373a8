# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's flags, `flags.txt`: what becomes of each of their values. Needs no other package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from blink.config import parse_object
from blink.errors import ConfigError

_FILE: Final = Path(__file__).with_name("flags.txt")
_NOTHING: Final = ("", "None", "null")
_INVERSES: Final = (("--enable-", "--disable-"), ("--disable-", "--enable-"))


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of vLLM."""

    names: tuple[str, ...]  # the long one first
    kind: str
    action: str
    words: tuple[str, ...]  # what the action is about
    reason: str
    section: str

    @property
    def name(self) -> str:
        """The flag's long name."""
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.kind == "switch"

    @property
    def negations(self) -> tuple[str, ...]:
        """The names that switch it off."""
        inverses = [new + self.name[len(old) :] for old, new in _INVERSES if self.name.startswith(old)]
        return (f"--no-{self.name[2:]}", *inverses) if self.is_switch else ()

    def to_own(self, value: str) -> str:
        """Return how Blink's own flag of this name has the value."""
        return dict(word.rsplit("=", 1) for word in self.words if "=" in word).get(value, value)

    def check(self, value: str) -> None:
        """Refuse a value that asks for something else than what Blink does.

        Raises:
            ConfigError: it does; the message says why that is not done here.
        """
        if self.action == "only" and not any(_is_equal(value, word) for word in (*_NOTHING, *self.words)):
            raise self._refusal(value)
        if self.action == "keys":
            self._check_keys(value)

    def _check_keys(self, value: str) -> None:
        known = {key: words for key, *words in (word.split("=") for word in self.words)}
        for key, found in parse_object(self.name[2:], value if value not in _NOTHING else "").items():
            if key not in known or (known[key] and spell(found) != known[key][0]):
                raise self._refusal(f"{key}={spell(found)}")

    def _refusal(self, value: str) -> ConfigError:
        shown = self.name if value == "on" else self.negations[0] if value == "off" else f"{self.name} {value}"
        return ConfigError(f"{shown} is not supported: {self.reason}")


@cache
def load_table() -> Mapping[str, Flag]:
    """Return all flags by each of their names."""
    flags: dict[str, Flag] = {}
    section = ""
    for line in _FILE.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("--"):
            names, kind, decision, *reason = line.split(" | ")
            action, *words = decision.split()
            flag = Flag(tuple(names.split()), kind, action, tuple(words), "".join(reason), section)
            flags.update(dict.fromkeys(flag.names, flag))
    return flags


def _is_equal(value: str, word: str) -> bool:
    return value == word or "".join(value.split()) == word


def spell(value: Any) -> str:
    """Return a value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
