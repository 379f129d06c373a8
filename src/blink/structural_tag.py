# SPDX-License-Identifier: Apache-2.0
"""Structural tags as JSON: xgrammar's older form, of structures and triggers, and its newer one, of formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from blink.errors import BadRequestError
from blink.structured_outputs import StructuralTag, StructuredOutputsParams, Tag

_PARAM = "structured_outputs"
# What stands for a whole text: the field of its format, and that of StructuredOutputsParams.
_WHOLE = {"json_schema": ("json_schema", "json"), "regex": ("pattern", "regex"), "grammar": ("grammar", "grammar")}


def read_structural_tag(given: str | Mapping[str, Any]) -> StructuredOutputsParams:
    """Return what a structural tag asks for.

    Raises:
        BadRequestError: it is malformed, or has a format that is not known here.
    """
    value = _parse(given)
    if "format" in value:
        return _read_format(_object(value["format"], "format"))
    return StructuredOutputsParams(
        structural_tag=StructuralTag(
            tags=[_tag_of(_object(each, "structures")) for each in _list(value, "structures")],
            trigger=_only_trigger(value),
        )
    )


def _parse(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        return _object(json.loads(given), "structural_tag")
    except (json.JSONDecodeError, RecursionError):
        raise BadRequestError("structural_tag is no JSON.", _PARAM) from None


def _read_format(form: Mapping[str, Any]) -> StructuredOutputsParams:
    kind = form.get("type")
    if kind in _WHOLE:
        field, name = _WHOLE[str(kind)]
        whole = _of(form, field, dict | bool if name == "json" else str)
        return StructuredOutputsParams(**dict[str, Any]({name: json.dumps(whole) if name == "json" else whole}))
    if kind == "const_string":
        return StructuredOutputsParams(choice=[_of(form, "value", str)])
    if kind == "tag":
        return StructuredOutputsParams(structural_tag=StructuralTag(tags=[_formatted_tag(form)], max_tags=1))
    most = 1 if form.get("stop_after_first") else None
    if kind == "triggered_tags" and not form.get("at_least_one"):
        tags = [_formatted_tag(_object(each, "tags")) for each in _list(form, "tags")]
        tag = StructuralTag(tags=tags, trigger=_only_trigger(form), max_tags=most)
        return StructuredOutputsParams(structural_tag=tag)
    if kind == "tags_with_separator" and form.get("at_least_one"):
        tags = [_formatted_tag(_object(each, "tags")) for each in _list(form, "tags")]
        tag = StructuralTag(tags=tags, separator=_of(form, "separator", str), max_tags=most)
        return StructuredOutputsParams(structural_tag=tag)
    known = "triggered_tags without at_least_one, tags_with_separator with at_least_one, tag, const_string"
    raise BadRequestError(
        f"structural_tag: a format of type {str(kind)[:64]!r} is not supported as it is here; these are: {known},"
        f" {', '.join(_WHOLE)}.",
        _PARAM,
    )


def _tag_of(structure: Mapping[str, Any]) -> Tag:
    return Tag(_of(structure, "begin", str), _of(structure, "schema", dict | bool), _of(structure, "end", str))


def _formatted_tag(form: Mapping[str, Any]) -> Tag:
    content = _object(form.get("content"), "content")
    if content.get("type") != "json_schema":
        raise BadRequestError("structural_tag: the content of a tag must be of type json_schema.", _PARAM)
    return Tag(_of(form, "begin", str), _of(content, "json_schema", dict | bool), _of(form, "end", str))


def _only_trigger(form: Mapping[str, Any]) -> str:
    triggers = set(map(str, _list(form, "triggers")))
    if len(triggers) != 1 or "" in triggers:
        raise BadRequestError("structural_tag must have one trigger: several are not supported.", _PARAM)
    return triggers.pop()


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequestError(f"structural_tag: {name} must hold objects.", _PARAM)
    return cast("Mapping[str, Any]", value)


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    return _of(value, name, list)


def _of(value: Mapping[str, Any], name: str, kind: Any) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        raise BadRequestError(f"structural_tag: {name} is missing or of another type.", _PARAM)
    return found
