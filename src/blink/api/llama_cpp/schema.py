# SPDX-License-Identifier: Apache-2.0
"""The bodies of POST /completion, /infill and /apply-template, and the completion that they ask for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, model_validator

from blink.api.llama_cpp.errors import naming_origins
from blink.api.openai.ggml_options import is_known, read_options
from blink.api.openai.schema import CompletionBody, ConversationBody, TokenIds
from blink.api.serving.body import Body
from blink.errors import BadRequestError
from blink.sampling_params import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES

_SNIPPET = "\n\n--- snippet ---\n\n"  # what llama.cpp puts before texts of other files
_MAX_RESPONSE_FIELDS = 64


class _GeneratingBody(Body):
    """What completions and infills share; the sampling options are further fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    stream: StrictBool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    n_probs: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | list[Any] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=_MAX_RESPONSE_FIELDS)] | None = None
    _asked: CompletionBody = PrivateAttr()

    @model_validator(mode="after")
    def _read_request(self) -> _GeneratingBody:
        extra = self.model_extra or {}
        with naming_origins():
            options = read_options({name: value for name, value in extra.items() if is_known(name)})
            self._asked = CompletionBody.model_validate({**self._fields(), **options, **self._prompt_fields()})
        return self

    @property
    def asked(self) -> CompletionBody:
        """Return the completion that is asked for."""
        return self._asked

    @abstractmethod
    def _prompt_fields(self) -> dict[str, Any]: ...

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": None,
            "stream": bool(self.stream),
            "ignore_eos": bool(self.ignore_eos),
            "logprobs": self.n_probs or None,
            "logit_bias": _biases(self.logit_bias),
        }
        if self.grammar:
            fields["structured_outputs"] = {"grammar": self.grammar}
        if self.json_schema is not None:
            schema = {"name": "answer", "schema": self.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


def _biases(given: dict[str, float] | list[Any] | None) -> dict[str, float] | None:
    """Return biases by token ids; llama.cpp has pairs, too, and false for a token that never comes."""
    if not isinstance(given, list):
        return given
    if len(given) > MAX_LOGIT_BIASES:
        raise BadRequestError(f"logit_bias must be at most {MAX_LOGIT_BIASES} entries, got {len(given)}.", "logit_bias")
    return dict(map(_bias_of, given))


def _bias_of(pair: Any) -> tuple[str, float]:
    is_pair = isinstance(pair, list) and len(pair) == 2
    if not is_pair or isinstance(pair[0], bool) or not isinstance(pair[0], int):
        raise BadRequestError("logit_bias must be pairs of a token id and a bias, or an object.", "logit_bias")
    if pair[1] is False:
        return str(pair[0]), -MAX_LOGIT_BIAS
    if isinstance(pair[1], bool) or not isinstance(pair[1], int | float):
        raise BadRequestError("logit_bias: a bias must be a number, or false.", "logit_bias")
    return str(pair[0]), pair[1]


class LlamaCppCompletionBody(_GeneratingBody):
    """POST /completion."""

    prompt: str | TokenIds

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt": self.prompt}


class Snippet(BaseModel):
    """Text of another file, for what is between two texts."""

    filename: str | None = None
    text: str


class InfillBody(_GeneratingBody):
    """POST /infill. prompt: the beginning of what is to be filled in."""

    input_prefix: str
    input_suffix: Annotated[str, Field(min_length=1)]
    input_extra: Annotated[list[Snippet], Field(fail_fast=True)] | None = None
    prompt: str | None = None

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt": "".join(self._texts()), "suffix": self.input_suffix}

    def _texts(self) -> Iterable[str]:
        for snippet in self.input_extra or ():
            yield _SNIPPET + snippet.text
        if self.input_extra:
            yield _SNIPPET
        yield self.input_prefix
        yield self.prompt or ""


class ApplyTemplateBody(ConversationBody):
    """POST /apply-template."""
