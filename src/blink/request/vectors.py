# SPDX-License-Identifier: Apache-2.0
"""What clients get of the vectors that an engine makes: embeddings of some length and scores, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blink.errors import BadRequestError, BlinkError
from blink.link.client import RegionInfo
from blink.region.layout import Task
from blink.text.generation import Generation, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Say how vectors are to be, by vLLM's names.

    Args:
        dimensions: of an embedding, its first ones; None: all.
        use_activation: whether embeddings have a length of 1 and scores are between 0 and 1; None: as the model's are.
        normalize: older vLLM's name of use_activation.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None

    def check(self, engine: RegionInfo) -> None:
        """Refuse dimensions that the model does not have.

        Raises:
            BadRequestError: it has fewer.
        """
        if self.dimensions is not None and not 1 <= self.dimensions <= engine.vector_width:
            told = f"dimensions must be between 1 and {engine.vector_width}, got {self.dimensions}."
            raise BadRequestError(told, "dimensions")

    def embedding_of(self, generation: Generation, engine: RegionInfo) -> Vector:
        """Return the embedding of a prompt, float32 [dimensions].

        Raises:
            BlinkError: the model made none.
        """
        vector = _vector_of(generation, engine)[: self.dimensions]
        if not self._normalizes(engine):
            return vector
        length = np.linalg.norm(vector.astype(np.float64))
        return (vector / max(length, _LEAST_LENGTH)).astype(np.float32)

    def score_of(self, generation: Generation, engine: RegionInfo) -> float:
        """Return the score of a prompt.

        Raises:
            BlinkError: the model made none.
        """
        logit = float(_vector_of(generation, engine)[0])
        return _sigmoid(logit) if self._normalizes(engine) else logit

    def _normalizes(self, engine: RegionInfo) -> bool:
        asked = self.normalize if self.use_activation is None else self.use_activation
        return engine.normalizes_vectors if asked is None else asked


_LEAST_LENGTH = 1e-12  # that torch.nn.functional.normalize divides by
_PURPOSES = {
    Task.GENERATE: "generates text",
    Task.EMBED: "makes embeddings",
    Task.SCORE: "scores texts",
}


def check_task(wanted: Task, engine: RegionInfo) -> None:
    """Refuse what an engine is not for.

    Raises:
        BadRequestError: it is for something else.
    """
    if refusal := refusal_of(wanted, engine.task):
        raise BadRequestError(refusal)


def refusal_of(wanted: Task, found: Task) -> str | None:
    """Return why an engine for one task does not do another; None: it is the same."""
    return None if wanted == found else f"This server's model {_PURPOSES[found]}; none here {_PURPOSES[wanted]}."


def pair_up(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Return each of the second texts with the only one of the first, or with its own.

    Raises:
        BadRequestError: the numbers of both do not fit, or there is none.
    """
    if not first or not second:
        raise BadRequestError("There must be at least one text on each side.", "text_2" if first else "text_1")
    if len(first) not in (1, len(second)):
        raise BadRequestError(f"{len(first)} texts cannot be scored against {len(second)}.", "text_2")
    return list(zip(first if len(first) > 1 else [*first] * len(second), second, strict=True))


def _vector_of(generation: Generation, engine: RegionInfo) -> Vector:
    if generation.finish_reason != "stop" or len(generation.vector) < engine.vector_width:
        raise BlinkError("The model made no finite numbers of this text.")
    return generation.vector[: engine.vector_width]


def _sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), whatever the logit is."""
    part = float(np.exp(-abs(logit)))
    return 1 / (1 + part) if logit >= 0 else part / (1 + part)
