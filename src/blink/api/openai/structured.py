# SPDX-License-Identifier: Apache-2.0
"""How a request asks for the form of its text: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from blink.errors import BadRequestError
from blink.grammar.compiler import MAX_GRAMMAR_BYTES
from blink.structural_tag import read_structural_tag
from blink.structured_outputs import MAX_CHOICES, StructuredOutputsParams

_PARAM = "structured_outputs"


def _check_size(value: object) -> object:
    """Refuse what is more work to read than any schema should be; bodies as long as this are read in a process."""
    if isinstance(value, dict | list) and len(_encode(value)) > MAX_GRAMMAR_BYTES:
        raise BadRequestError(f"A schema or a list of choices may have {MAX_GRAMMAR_BYTES} bytes.", _PARAM)
    return value


def _encode(value: object) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise BadRequestError("A schema holds what is no JSON, or is nested too deeply.", _PARAM) from None


_Grammar = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
_Schema = Annotated[dict[str, Any] | bool, AfterValidator(_check_size)]
_Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True), AfterValidator(_check_size)]


_Items = Annotated[list[Any], AfterValidator(_check_size)]
_Part = Annotated[dict[str, Any], AfterValidator(_check_size)]
_SCHEMAS, _TAGS = ("json_schema", "schema_"), ("structures", "triggers", "format")
# The members of a response_format by its type.
_ALLOWED = {"text": (), "json_object": ("schema_",), "json_schema": _SCHEMAS, "structural_tag": _TAGS}


class JsonSchemaFormat(BaseModel):
    """The schema of a response_format."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON; a schema may stand in it by itself, as in llama.cpp, Together and Fireworks."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    structures: _Items | None = None
    triggers: _Items | None = None
    format: _Part | None = None

    @model_validator(mode="after")
    def _check_schemas(self) -> ResponseFormat:
        given = [name for name in (*_SCHEMAS, *_TAGS) if getattr(self, name) is not None]
        is_tag = self.type == "structural_tag"
        most = 2 if is_tag and "format" not in given else 1
        if len(given) > most or not set(given) <= set(_ALLOWED[self.type]):
            told = " and ".join(name.rstrip("_") for name in given)
            raise BadRequestError(f"response_format of type {self.type} cannot have {told}.", "response_format")
        return self

    @property
    def schema_text(self) -> str | None:
        """Return the schema that JSON must keep to, None for any object.

        Raises:
            BadRequestError: there must be one.
        """
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if self.type == "json_schema" and schema is None:
            raise BadRequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
        return None if self.type == "json_object" and schema in ({}, True) else _as_text(schema)

    @property
    def is_form(self) -> bool:
        """Say whether it asks for anything."""
        return self.type != "text"

    @property
    def tag(self) -> dict[str, Any]:
        """Return the members of a structural tag that are there."""
        return {name: value for name in _TAGS if (value := getattr(self, name)) is not None}


class StructuredOutputsBody(BaseModel):
    """vLLM's way to ask for a form."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[_Schema | _Grammar | None, Field(alias="json")] = None
    regex: _Grammar | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False  # members that are not declared are never written
    disable_fallback: bool = False  # there is one backend
    whitespace_pattern: str | None = None
    structural_tag: _Grammar | None = None


def read_structured_outputs(
    response_format: ResponseFormat | None, structured: StructuredOutputsBody | None
) -> StructuredOutputsParams | None:
    """Return what form a request asks for; None if any will do.

    Raises:
        BadRequestError: it asks for nothing that can be kept.
    """
    if structured is not None:
        if structured.whitespace_pattern is not None:
            raise BadRequestError("whitespace_pattern is not supported by this server.", "structured_outputs")
        return StructuredOutputsParams(
            structural_tag=structured.structural_tag,
            json=_as_text(structured.json_),
            regex=structured.regex,
            choice=structured.choice,
            grammar=structured.grammar,
            json_object=structured.json_object,
            disable_any_whitespace=structured.disable_any_whitespace,
        )
    if response_format is None or not response_format.is_form:
        return None
    if response_format.type == "structural_tag":
        return read_structural_tag(response_format.tag)
    schema = response_format.schema_text
    return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)


def _as_text(schema: dict[str, Any] | bool | str | None) -> str | None:
    """Return a schema as its text, which is cheap to compare and to hand to another thread."""
    return schema if schema is None or isinstance(schema, str) else _encode(schema).decode()
