# SPDX-License-Identifier: Apache-2.0
"""The bodies of embeddings, scores and ranks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.link.client import RegionInfo
from blink.request.vectors import PoolingParams
from blink.text.generation import Generation, Vector


@dataclass(slots=True, kw_only=True)
class VectorsReply(Reply):
    """The form of a response that is made of vectors."""

    engine: RegionInfo
    form: PoolingParams


@dataclass(slots=True, kw_only=True)
class EmbeddingsReply(VectorsReply):
    """The form of embeddings: lists of numbers, or the little-endian floats of each in base64."""

    is_base64: bool


@dataclass(slots=True, kw_only=True)
class ScoresReply(VectorsReply):
    """The form of scores."""


@dataclass(slots=True, kw_only=True)
class RanksReply(VectorsReply):
    """The form of ranks: the best num_results, with their documents unless these are None."""

    documents: Sequence[str] | None
    num_results: int


class VectorsObject:
    """The body of a response that is made of vectors."""

    def __init__(self, reply: VectorsReply, session: Session) -> None:
        self._reply = reply
        self._session = session

    def take(self, generation: Generation) -> None:
        """Leave the vector with its sequence."""

    def encode(self) -> bytes:
        """Return the body when all sequences have ended."""
        reply, tokens = self._reply, sum(prompt.num_tokens for prompt in self._session.prompts)
        body = {"id": reply.id, "created": reply.created, "model": reply.model, **self._results()}
        body["usage"] = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _results(self) -> dict[str, Any]:
        reply, generations = self._reply, self._session.generations
        if isinstance(reply, EmbeddingsReply):
            data = [self._embedding(reply, generation) for generation in generations]
            return {"object": "list", "data": data}
        scores = [reply.form.score_of(generation, reply.engine) for generation in generations]
        if isinstance(reply, RanksReply):
            return {"results": _rank(reply, scores)}
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {"object": "list", "data": data}

    @staticmethod
    def _embedding(reply: EmbeddingsReply, generation: Generation) -> dict[str, Any]:
        vector = np.ascontiguousarray(reply.form.embedding_of(generation, reply.engine))
        shown: str | Vector = base64.b64encode(vector.astype("<f4").tobytes()).decode() if reply.is_base64 else vector
        return {"index": generation.index, "object": "embedding", "embedding": shown}


def _rank(reply: RanksReply, scores: list[float]) -> list[dict[str, Any]]:
    """Return the best documents, equal ones in the order of the request."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: reply.num_results]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if reply.documents is not None:
        for result in results:
            result["document"] = {"text": reply.documents[result["index"]]}
    return results
