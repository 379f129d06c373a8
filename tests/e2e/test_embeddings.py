# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores of the CPU engine against transformers in float32; and what LLM refuses of such models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blink import LLM, PoolingParams
from blink.errors import BadRequestError, ConfigError
from embeddings_check import check_embeddings, check_scores
from pooling_models import HIDDEN, save_embedder, save_reranker, write_pooling


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_embeddings_are_transformers(tmp_path: Path, mode: str) -> None:
    check_embeddings(tmp_path, mode, 1e-5, dtype="float32")


def test_a_step_in_segments_is_not_one_of_a_model_that_pools(tmp_path: Path) -> None:
    """However short a segment may be: steps run whole, also those of best-effort requests."""
    check_embeddings(tmp_path, "mean_tokens", 1e-5, dtype="float32", segment_ms=0.001)


@pytest.mark.parametrize(
    ("converted", "tied"), [(False, True), (False, False), (True, True)], ids=["tied", "untied", "classifier"]
)
def test_scores_are_transformers(tmp_path: Path, converted: bool, tied: bool) -> None:
    check_scores(tmp_path, 1e-5, converted=converted, tied=tied, dtype="float32")


def test_what_a_model_that_embeds_does_and_does_not(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [whole] = llm.embed([5, 6, 7], use_tqdm=False)
        assert (whole.finished, whole.num_cached_tokens, whole.outputs.hidden_size) == (True, 0, HIDDEN)
        [short] = llm.embed([5, 6, 7], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        first = np.array(whole.outputs.embedding[:8])
        assert short.outputs.embedding == pytest.approx(first / np.linalg.norm(first), abs=1e-6)
        [cut] = llm.embed([9, 5, 6, 7], truncate_prompt_tokens=3, use_tqdm=False)
        assert cut.outputs.embedding == pytest.approx(whole.outputs.embedding, abs=1e-6)
        many = llm.embed([[5, 6, 7]] * 600, use_tqdm=False)
        assert all(each.outputs.embedding == pytest.approx(whole.outputs.embedding, abs=1e-5) for each in many)
        for call, word in (
            (lambda: llm.generate("x"), "makes embeddings"),
            (lambda: llm.chat([{"role": "user", "content": "x"}]), "makes embeddings"),
            (lambda: llm.score("a", "b"), "makes embeddings"),
            (lambda: llm.embed([[]]), "empty"),
            (lambda: llm.embed([5] * 513), "context length"),
            (lambda: llm.embed("x", pooling_params=PoolingParams(dimensions=HIDDEN + 1)), "dimensions"),
            (lambda: llm.classify("x"), "not supported"),
        ):
            with pytest.raises(BadRequestError, match=word):
                call()


def test_options_change_what_the_files_say(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with LLM(str(tmp_path), dtype="float32", task="embed", override_pooler_config={"normalize": False}) as llm:
        raw = np.array(llm.embed([5, 6, 7], use_tqdm=False)[0].outputs.embedding)
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    with LLM(str(tmp_path), dtype="float32", runner="generate") as llm:
        assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(BadRequestError, match="generates text"):
            llm.embed("x")


def test_what_is_not_pooled_so_is_refused_at_the_start(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    write_pooling(tmp_path, "max_tokens")
    with pytest.raises(ConfigError, match="pooling by max_tokens"):
        LLM(str(tmp_path))
    save_reranker(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"classifier_from_token|perhaps"):
        LLM(str(tmp_path / "other"), hf_overrides={"classifier_from_token": ["no", "perhaps"]})
