# SPDX-License-Identifier: Apache-2.0
"""How a request asks for the form of its text: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from blink.errors import BadRequestError
from blink.grammar.compiler import MAX_GRAMMAR_BYTES
from blink.structured_outputs import MAX_CHOICES, StructuredOutputsParams

_Grammar = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
_Schema = dict[str, Any] | bool


class JsonSchemaFormat(BaseModel):
    """The schema of a response_format."""

    model_config = ConfigDict(protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def is_json(self) -> bool:
        """Say whether it asks for anything."""
        return self.type != "text"


class StructuredOutputsBody(BaseModel):
    """vLLM's way to ask for a form."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[_Schema | _Grammar | None, Field(alias="json")] = None
    regex: _Grammar | None = None
    choice: Annotated[list[_Grammar], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: _Grammar | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False  # members that are not declared are never written
    disable_fallback: bool = False  # there is one backend
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


def read_structured_outputs(
    response_format: ResponseFormat | None, structured: StructuredOutputsBody | None
) -> StructuredOutputsParams | None:
    """Return what form a request asks for; None if any will do.

    Raises:
        BadRequestError: it asks for nothing that can be kept.
    """
    if structured is not None:
        for name in ("whitespace_pattern", "structural_tag"):
            if getattr(structured, name) is not None:
                raise BadRequestError(f"{name} is not supported by this server.", "structured_outputs")
        return StructuredOutputsParams(
            json=structured.json_,
            regex=structured.regex,
            choice=structured.choice,
            grammar=structured.grammar,
            json_object=structured.json_object,
            disable_any_whitespace=structured.disable_any_whitespace,
        )
    if response_format is None or not response_format.is_json:
        return None
    if response_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = response_format.json_schema.schema_ if response_format.json_schema is not None else None
    if schema is None:
        raise BadRequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
    return StructuredOutputsParams(json=schema)
