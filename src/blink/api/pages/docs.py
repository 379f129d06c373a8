# SPDX-License-Identifier: Apache-2.0
"""The page at /docs: the OpenAPI document as plain HTML, without a script and without a file from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Response

from blink.api.pages.files import HEADERS, add_static_file

_METHODS = ("get", "post", "put", "patch", "delete")
_SCHEMAS = "#/components/schemas/"
_STYLE, _ICON = "docs.css", "icon.svg"
_HEAD = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Blink: the API</title>
<link rel="icon" href="page/{_ICON}">
<link rel="stylesheet" href="page/{_STYLE}">
<h1>Blink %s</h1>
<p>The server's API. The same for programs: <a href="openapi.json">openapi.json</a>.</p>
"""

Schema = Mapping[str, Any]


def add_docs_page(app: FastAPI) -> None:
    """Serve the page of an application's routes and its files, of which the page at / has the icon too; no key."""
    for name in (_STYLE, _ICON):
        add_static_file(app.router, f"/page/{name}", name)

    @app.get("/docs", include_in_schema=False)
    @app.head("/docs", include_in_schema=False)
    async def show_docs() -> Response:
        return Response(render_docs(app.openapi()), headers=HEADERS, media_type="text/html")


def render_docs(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    schemas: Mapping[str, Schema] = document.get("components", {}).get("schemas", {})
    parts = [_HEAD % escape(document["info"]["version"])]
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                parts += _operation(method, path, methods[method], schemas)
    return "".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n<p>{escape(operation.get('description', ''))}</p>\n"
    content = operation.get("requestBody", {}).get("content", {})
    body: Schema = content.get("application/json", {}).get("schema", {})
    for option in body.get("oneOf", [body]):
        name = str(option.get("$ref", "")).removeprefix(_SCHEMAS)
        if name in schemas:
            yield _table(name, schemas[name])


def _table(name: str, schema: Schema) -> str:
    rows: list[str] = []
    for field, kind in schema.get("properties", {}).items():
        default = "required" if field in schema.get("required", ()) else json.dumps(kind.get("default"))
        rows.append(f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(kind))}<td>{escape(default)}\n")
    return f"<table><caption>{escape(name)}</caption>\n<tr><th>field<th>type<th>default\n{''.join(rows)}</table>\n"


def _kind(schema: Schema) -> str:
    """Return the type that a schema describes, in a few words."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_SCHEMAS)
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return schema.get("type", "any")
