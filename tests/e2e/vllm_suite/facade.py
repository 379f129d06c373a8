# SPDX-License-Identifier: Apache-2.0
"""Packages `vllm` and `tests.utils` that exist while vLLM's own tests run: its public names, with Blink behind them.

A name that is not here is an Internal: it can be imported and named in annotations. A test that uses it fails, and the
message says which internal it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import parsers
import reasoning_parsers
import servers

_LIBRARIES = ("mistral_common", "openai_harmony", "partial_json_parser", "xgrammar")


class NeedsInternalError(NotImplementedError):
    """A test uses what only vLLM has."""


class _InternalType(type):
    """The type of names that Blink has nothing for."""

    def __call__(cls, *_: object, **__: object) -> Any:
        raise NeedsInternalError(f"needs {cls.__module__}.{cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NeedsInternalError(f"needs {cls.__module__}.{cls.__name__}.{name}")


class _Module(ModuleType):
    """A module of vLLM."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _NAMES.get(name) or parsers.find_class(name) or reasoning_parsers.find_class(name)
        return found or _InternalType(name, (), {"__module__": self.__name__})


_NAMES = parsers.NAMES | reasoning_parsers.NAMES | servers.NAMES | {"VLLMValidationError": ValueError}


class _Finder(MetaPathFinder, Loader):
    """Finds every module of vLLM, and of libraries of its that are not installed."""

    def __init__(self) -> None:
        self._roots = {"vllm", *(name for name in _LIBRARIES if find_spec(name) is None)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say that it is here."""
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._roots else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make one that has all names."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""
        module.__path__ = []


def install(checkout: Path) -> None:
    """Let the tests of a checkout import what they need."""
    sys.meta_path.insert(0, _Finder())
    package = ModuleType("tests")
    package.__path__ = [str(checkout / "tests")]
    utils = ModuleType("tests.utils")
    utils.__dict__.update(servers.NAMES)
    sys.modules |= {"tests": package, "tests.utils": utils}
    package.__dict__["utils"] = utils
