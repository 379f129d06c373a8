# SPDX-License-Identifier: Apache-2.0
"""The bodies of /v1/embeddings, /v1/rerank and /v1/score: OpenAI's, Jina's, Cohere's and vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictInt, model_validator

from blink.api.openai.field_checks import check_printable
from blink.api.openai.schema import Prompt, Texts, TokenIds, list_prompts
from blink.api.serving.body import MAX_ID_CHARS, Body
from blink.errors import BadRequestError
from blink.request.vectors import PoolingParams, pair_up
from blink.sampling_params import SamplingParams
from blink.text.prompt import PromptRules

_Truncation = Annotated[int, Field(ge=-1)]
# Field -> what it may be besides None, of fields whose other values would change the answer.
_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    "activation": (),
    "softmax": (),
    "rank_fields": ([],),
}


class PoolingBody(Body):
    """The fields that all of them share."""

    truncate_prompt_tokens: _Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    service_tier: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS), AfterValidator(check_printable)] | None = (
        None
    )
    normalize: bool | None = None
    use_activation: bool | None = None
    user: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_others(cls, fields: Any) -> Any:
        for name in _FIELDS.keys() & fields.keys() if isinstance(fields, dict) else ():
            if fields[name] is not None and fields[name] not in _FIELDS[name]:
                raise BadRequestError(f"{name} is not supported by this server.", name)
        return fields

    @property
    def params(self) -> SamplingParams:
        """Return what the engine is to know of the request: nothing is generated."""
        flex = self.service_tier == "flex"
        return SamplingParams(max_tokens=1, detokenize=False, priority=self.priority, best_effort=flex)

    @property
    def _switches(self) -> dict[str, bool | None]:
        return {"use_activation": self.use_activation, "normalize": self.normalize}


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = None
    add_special_tokens: bool = True

    @property
    def sources(self) -> list[str] | list[TokenIds]:
        """Return the inputs as a list of texts or of token ids."""
        return list_prompts(self.input)

    @property
    def rules(self) -> PromptRules:
        """Return how the inputs are to be treated."""
        return PromptRules(
            add_special_tokens=self.add_special_tokens,
            truncate=self.truncate_prompt_tokens,
            truncate_right=self.truncation_side == "right",
            param="input",
        )

    @property
    def form(self) -> PoolingParams:
        """Return how the embeddings are to be."""
        return PoolingParams(dimensions=self.dimensions, **self._switches)


class TextPart(BaseModel):
    """A document that is an object."""

    text: str


_Document = str | TextPart
_Documents = Annotated[list[_Document], Field(fail_fast=True)]


def text_of(document: _Document) -> str:
    """Return the text of a document."""
    return document if isinstance(document, str) else document.text


class RankingBody(PoolingBody):
    """What scores and ranks share."""

    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    @property
    def form(self) -> PoolingParams:
        """Return how the scores are to be."""
        return PoolingParams(**self._switches)


class RerankBody(RankingBody):
    """POST /v1/rerank."""

    query: str
    documents: _Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True


class ScoreBody(RankingBody):
    """POST /v1/score: one text against several, or pairs."""

    text_1: str | Texts
    text_2: str | Texts

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, fields: Any) -> Any:
        """Take vLLM's other names of the two."""
        if not isinstance(fields, dict):
            return fields
        for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            if first in fields and second in fields and not {"text_1", "text_2"} & fields.keys():
                return {**fields, "text_1": fields[first], "text_2": fields[second]}
        return fields

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of query and document.

        Raises:
            BadRequestError: the numbers of both do not fit.
        """
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        return pair_up(first, second)
