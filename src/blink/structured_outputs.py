# SPDX-License-Identifier: Apache-2.0
"""How the output of a request is constrained: the names of vLLM's StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tag:
    """One form that a call may have: literal text, JSON by a schema, literal text."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """Free text until the trigger, from there on one of the tags; without a trigger calls alone."""

    tags: Sequence[Tag]
    trigger: str = ""
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    max_tags: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six says what the output must be."""

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | None = None
    disable_any_whitespace: bool = False
