# SPDX-License-Identifier: Apache-2.0
"""A schema with all schemas inside: checked, and found by what a $ref names."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from blink.grammar.errors import GrammarError
from blink.grammar.nodes import Node, schema_node
from blink.grammar.schema_check import ANNOTATIONS, MAP_KEYWORDS, SCHEMA_KEYWORDS, check_schema, schemas_inside

# Keywords of a draft that are neither obeyed nor may be left out of account.
_REFUSED = ("$dynamicRef", "$recursiveRef")
_REFUSED_OF_DRAFT_3 = ("extends", "disallow", "divisibleBy")


class SchemaIndex:
    """The parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._documents: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}  # by schema: the document that its references start from
        self._keywords: set[str] = set()
        self._keys: dict[int, int] = {}  # by part
        self._numbers: dict[Hashable, int] = {}  # by what a part says
        self._is_draft_3 = isinstance(root, Mapping) and "draft-03" in str(root.get("$schema", ""))
        self._add(root, "")

    def mentions(self, *keywords: str) -> bool:
        """Say whether one of some keywords stands anywhere in the schema."""
        return any(keyword in self._keywords for keyword in keywords)

    def node(self, schema: Any) -> Node:
        """Return the node of a part of the schema; parts that say the same are one."""
        return schema_node(schema, self._key_of(schema) if isinstance(schema, dict) else None)

    def _key_of(self, part: Any, keyword: str = "allOf") -> Hashable:
        """Return what a part has in common with those that say the same; keyword: what it is the value of."""
        if keyword not in SCHEMA_KEYWORDS or not isinstance(part, dict | list):
            return json.dumps(part)
        if isinstance(part, list):
            return ("list", *(self._key_of(each, keyword) for each in part))
        if keyword in MAP_KEYWORDS:
            return ("map", *((name, self._key_of(each)) for name, each in part.items()))
        known = self._keys.get(id(part))
        if known is None:
            content = tuple((name, self._key_of(each, name)) for name, each in part.items() if name not in ANNOTATIONS)
            # References are of the document that they stand in.
            place = (content, self._bases.get(id(part), "") if "$ref" in part else None)
            known = self._keys[id(part)] = self._numbers.setdefault(place, len(self._numbers))
        return known

    def check_supported(self, schema: Mapping[str, Any]) -> None:
        """Refuse keywords of JSON Schema that are not obeyed.

        Raises:
            GrammarError: there is one.
        """
        for name in (*_REFUSED, *(_REFUSED_OF_DRAFT_3 if self._is_draft_3 else ())):
            if name in schema:
                raise GrammarError(f"the keyword {name!r} is not supported")

    def types_of(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the types that a schema names."""
        found = schema["type"]
        return [found] if isinstance(found, str) else list(found)

    def dependencies_of(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Return what the presence of a member asks for: names of others, or a schema of the object."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in schema.get(keyword, {}).items():
                yield name, [needed] if isinstance(needed, str) else needed

    def resolve(self, schema: Mapping[str, Any]) -> Any:
        """Return what the $ref of a schema means.

        Raises:
            GrammarError: it is of another document, or of nothing.
        """
        reference = schema["$ref"]
        target, _, fragment = urllib.parse.urljoin(self._bases.get(id(schema), ""), reference).partition("#")
        if not target and reference.startswith("#"):
            target = ""
        if target not in self._documents:
            raise GrammarError(f"$ref {reference[:80]!r} is not of this schema (such as #/$defs/name)")
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (target, fragment) not in self._anchors:
                raise GrammarError(f"$ref {reference[:80]!r} leads nowhere")
            return self._anchors[target, fragment]
        found = self._follow(self._documents[target], fragment, reference)
        if isinstance(found, Mapping) and id(found) not in self._bases:
            self._add(found, target)
        elif not isinstance(found, Mapping | bool):
            raise GrammarError(f"$ref {reference[:80]!r} leads to what is no schema")
        return found

    def _follow(self, found: Any, pointer: str, reference: str) -> Any:
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and name.isascii() and int(name[:9]) < len(found):
                found = found[int(name[:9])]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise GrammarError(f"$ref {reference[:80]!r} leads nowhere")
        return found

    def _add(self, root: Any, base: str) -> None:
        """Check a schema and note what is in it. Schemas inside come behind those around them."""
        bases: dict[int, str] = {id(root): base}
        for schema in check_schema(root):
            base = bases.get(id(schema), base)
            name = schema.get("$id", schema.get("id"))
            anchor = schema.get("$anchor", schema.get("$dynamicAnchor"))
            if isinstance(name, str) and name.startswith("#"):  # of drafts before 2019
                anchor = name[1:]
            elif isinstance(name, str) and ("$id" in schema or schema is root):
                base = urllib.parse.urljoin(base, name).partition("#")[0]
                self._documents.setdefault(base, schema)
            self._bases[id(schema)] = base
            if isinstance(anchor, str):
                self._anchors.setdefault((base, anchor), schema)
            self._keywords.update(schema)
            for _, inside in schemas_inside(schema):
                bases[id(inside)] = base
