# SPDX-License-Identifier: Apache-2.0
"""The JSON of an argument that a model wrote as text, by the types that the function's schema allows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from blink.grammar.members import READ_AS, READ_AS_FROM
from blink.grammar.schema_forms import KINDS

STRING = frozenset({"string"})
_ALL = STRING | READ_AS.keys() | READ_AS_FROM.keys()
_SPACE = " \t\r\n"
_WORDS = {name: re.compile(pattern) for name, pattern in READ_AS.items()}
_WHOLE = re.compile(r"(?<=[0-9])\.0+$")
_INTEGER = re.compile(r"([+-]?)0*([0-9]+?)(?:\.0*)?")
ANY: frozenset[str] = frozenset()
_MAX_SCHEMAS = 256  # that are looked at for one value
# Names of types that schemas made of Python's or of databases' have.
_OTHER_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("list", "arr", "sequence"), "array"),
    "bool": "boolean",
    "dict": "object",
}


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """Return the JSON types of an argument by the schema of all; empty: any, None: the schema does not know it."""
    found = member_schema(parameters, name, parameters)
    return None if found is None else types_of(found, parameters)


def member_schema(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of an object's member, None where the object's schema has none for it.

    A schema that tells no member from another lets each be anything.
    """
    parts = list(_parts(schema, root, set()))
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    if found := next((found for part in parts if (found := part.get("additionalProperties"))), None):
        return found
    is_free = bool(schema) and not any({"properties", "additionalProperties"} & part.keys() for part in parts)
    return True if is_free else None


def item_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema of an array's items, None where the array's schema has none."""
    return next((part["items"] for part in _parts(schema, root, set()) if "items" in part), None)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty: any."""
    return _types(schema, root, set()) or ANY


def to_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: of one of the types, in doubt a string."""
    word = text.strip(_SPACE)
    if not types:
        return word if _is_json(word) else quote(text)
    kind = next((name for name, pattern in _WORDS.items() if name in types and pattern.fullmatch(word)), "string")
    if kind == "null":
        return "null"
    if kind == "boolean":
        return word.lower()
    if kind == "integer":
        return _INTEGER.sub(lambda found: ("-" if found[1] == "-" else "") + found[2], word)
    if kind == "number":
        return _WHOLE.sub("", word)
    may_be_json = any(name in types and word.startswith(first) for name, first in READ_AS_FROM.items())
    return word if may_be_json and _is_json(word) else quote(text)


def unwrap(text: str, parameters: Mapping[str, Any]) -> str:
    """Return the members of an object's JSON, if the text is some and the schema knows them all, else nothing."""
    known = parameters.get("properties")
    if not _is_json(text) or not isinstance(known, Mapping):
        return ""
    value = json.loads(text)
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        return ""
    return text.strip(_SPACE)[1:-1].strip(_SPACE)


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> frozenset[str] | None:
    """Return the types, None for a schema that was seen before, which allows nothing more."""
    if not isinstance(schema, Mapping):
        return ANY
    if id(schema) in seen or len(seen) >= _MAX_SCHEMAS:
        return None
    seen.add(id(schema))
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, seen)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_type_of, values))
    found = schema.get("type")
    if isinstance(found, str | list):
        names = [found] if isinstance(found, str) else [each for each in found if isinstance(each, str)]
        known = frozenset(_OTHER_NAMES.get(each.lower(), each) for each in names)
        return known if known <= _ALL else ANY
    for name in ("anyOf", "oneOf"):
        if options := _mappings(schema.get(name)):
            allowed = [found for option in options if (found := _types(option, root, seen)) is not None]
            return ANY if ANY in allowed else frozenset().union(*allowed)
    demanded = [found for part in _mappings(schema.get("allOf")) if (found := _types(part, root, seen))]
    return demanded[0] if demanded else frozenset(kind for kind, names in KINDS.items() if names & schema.keys())


def _parts(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those within it that its value may have to keep to."""
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) >= _MAX_SCHEMAS:
        return
    seen.add(id(schema))
    yield schema
    if isinstance(schema.get("$ref"), str):
        yield from _parts(_resolve(schema["$ref"], root), root, seen)
    for name in ("allOf", "anyOf", "oneOf"):
        for part in _mappings(schema.get(name)):
            yield from _parts(part, root, seen)


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) and reference.startswith("#") else {}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
