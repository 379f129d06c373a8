# SPDX-License-Identifier: Apache-2.0
"""What embeddings, scores and ranks make of their checked bodies: prompts for the engine, and their reply.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from blink.api.openai.pooling.schema import EmbeddingBody, PoolingBody, RankingBody, RerankBody, ScoreBody, text_of
from blink.api.openai.pooling.write import EmbeddingsReply, RanksReply, ScoresReply, VectorsReply
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets
from blink.text.prompt import PromptRules, read_tokens
from blink.text.rerank_prompt import RerankPrompts

_TEXTS = {"input", "query", "documents", "text_1", "text_2", "instruction", "user"}


def read_embeddings(body: EmbeddingBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Tokenize the inputs of embeddings."""
    parsed_at, sources = time.perf_counter(), body.sources
    if not sources:
        raise BadRequestError("input must not be empty.", "input")
    _check_count(len(sources), engine, "input")
    body.form.check(engine)
    prompts = [read_tokens(source, body.rules, assets.tokenizer, engine) for source in sources]
    reply = EmbeddingsReply(engine=engine, form=body.form, is_base64=body.encoding_format == "base64")
    return _parsed(body, prompts, body.rules, reply, bounds, parsed_at)


def read_rerank(body: RerankBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Make a prompt of the query and each document."""
    parsed_at, documents = time.perf_counter(), [text_of(document) for document in body.documents]
    if not documents:
        raise BadRequestError("documents must not be empty.", "documents")
    pairs = [(body.query, document) for document in documents]
    reply = RanksReply(
        engine=engine,
        form=body.form,
        documents=documents if body.return_documents else None,
        num_results=body.top_n or len(documents),
    )
    prompts = _make_prompts(body, pairs, assets, engine, "documents")
    return _parsed(body, prompts, PromptRules(add_special_tokens=False, param="documents"), reply, bounds, parsed_at)


def read_score(body: ScoreBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Make a prompt of each pair of texts."""
    parsed_at = time.perf_counter()
    prompts = _make_prompts(body, body.pairs, assets, engine, "text_2")
    reply = ScoresReply(engine=engine, form=body.form)
    return _parsed(body, prompts, PromptRules(add_special_tokens=False, param="text_2"), reply, bounds, parsed_at)


def _make_prompts(
    body: RankingBody, pairs: Sequence[tuple[str, str]], assets: ModelAssets, engine: RegionInfo, param: str
) -> list[Any]:
    _check_count(len(pairs), engine, param)
    make = RerankPrompts(assets.tokenizer, body.instruction, engine.longest_prompt).make
    cuts = {"truncate": body.truncate_prompt_tokens, "document_tokens": body.max_tokens_per_doc}
    return [make(query, document, **cuts) for query, document in pairs]


def _check_count(count: int, engine: RegionInfo, param: str) -> None:
    if count > engine.max_sequences:
        raise BadRequestError(f"One request may have at most {engine.max_sequences} texts, got {count}.", param)


def _parsed(
    body: PoolingBody, prompts: list[Any], rules: PromptRules, reply: VectorsReply, bounds: Bounds, parsed_at: float
) -> ParsedRequest:
    return ParsedRequest(
        model=body.model,
        prompts=prompts,
        rules=rules,
        params=body.params,
        reply=reply,
        request_id=body.request_id,
        shown=body.model_dump(exclude=_TEXTS, exclude_unset=True) if bounds.shows_fields else {},
        parsed_at=parsed_at,
    )
