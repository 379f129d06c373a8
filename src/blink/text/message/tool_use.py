# SPDX-License-Identifier: Apache-2.0
"""What a request allows or demands of tools, and the constraint on its output that makes the model keep to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blink.structured_outputs import StructuralTag, Tag
from blink.text.message.format_kinds import CallFormat

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Of a schema that says of its members nothing but that there are none.
_PLAIN_KEYWORDS = {"type", "properties", "required", "$schema", "title", "description"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `parameters` is the JSON schema of its arguments, empty where it takes none."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a reply may call, or must."""

    functions: tuple[Function, ...]
    choice: Literal["auto", "required", "named"] = "auto"
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Return the functions' names."""
        return frozenset(function.name for function in self.functions)

    @property
    def is_binding(self) -> bool:
        """Say whether the output must be constrained: then a schema that cannot be compiled refuses the request."""
        return self.choice != "auto" or any(function.strict for function in self.functions)


def constrain(use: ToolUse, form: CallFormat) -> StructuralTag | None:
    """Return what the output must keep to, None where it is free.

    A choice of the model's own is constrained from the marker of a call on. Where several calls share one marker that
    allows a single call, so there it is done for strict functions only. Where nothing but calls tells that one begins,
    it is not done.
    """
    most = 1 if use.choice == "named" or not use.parallel else None
    if use.choice != "auto":
        tags = _tags(use, form)
        return StructuralTag(tags=tags, separator=form.separator, prefix=form.prefix, suffix=form.suffix, max_tags=most)
    if not form.trigger or (form.is_list and not use.is_binding):
        return None
    return StructuralTag(tags=_tags(use, form, form.prefix, form.suffix), trigger=form.trigger, max_tags=most)


def schemas_of(use: ToolUse) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments by the functions' names."""
    return {function.name: _schema_of(function.parameters or {}) for function in use.functions}


def _schema_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments; parameters that name no property allow none, as in OpenAI's API."""
    has_none = parameters.get("properties") == {} and parameters.keys() <= _PLAIN_KEYWORDS
    return _NO_ARGUMENTS if has_none or not parameters else parameters


def _tags(use: ToolUse, form: CallFormat, before: str = "", behind: str = "") -> list[Tag]:
    return [
        Tag(before + form.begin % name, schema, form.end + behind, form.parameters)
        for name, schema in schemas_of(use).items()
    ]
