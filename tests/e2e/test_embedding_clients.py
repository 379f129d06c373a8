# SPDX-License-Identifier: Apache-2.0
"""Clients of embeddings and ranks, unmodified, against servers of small models that embed and rank.

OpenAI's client runs in the gate; LangChain's embeddings are of the extra "clients".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from pooling_models import HIDDEN, embed, save_embedder, save_reranker, score
from processes import Frontend, run_engine, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TEXTS = ["The lighthouse keeper counted seven ships.", "Bread needs flour.", "é 👩", "x " * 200]
_SIZES = ["--max-num-seqs=16", "--max-num-batched-tokens=128", "--num-queue-pairs=2", "--dtype=float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_embedder(folder)


@pytest.fixture(scope="module")
def embedder(folder: Path, model: Any) -> Iterator[Frontend]:
    del model  # whose files it reads
    with run_engine(str(folder), *_SIZES) as engine:
        frontend = start_frontend(engine.region, f"--model={folder}", "--keep-alive-timeout=60")
        yield frontend
        stop(frontend.process)


def expect(server: Frontend, model: Any, texts: list[str]) -> list[list[float]]:
    """Return transformers' embeddings of the tokens that the server makes of texts."""
    tokens = [server.post("/tokenize", prompt=text).json()["tokens"] for text in texts]
    return [embed(model, each).tolist() for each in tokens]


def test_openais_client_gets_transformers_embeddings(embedder: Frontend, model: Any) -> None:
    """The client asks for base64 by itself where numpy is installed."""
    expected = expect(embedder, model, TEXTS)
    found = embedder.client.embeddings.create(model=embedder.model, input=TEXTS)
    for entry, values in zip(found.data, expected, strict=True):
        assert entry.embedding == pytest.approx(values, abs=1e-5)
    as_floats = embedder.client.embeddings.create(model=embedder.model, input=TEXTS[1], encoding_format="float")
    assert as_floats.data[0].embedding == pytest.approx(expected[1], abs=1e-5)
    first = embedder.client.embeddings.create(model=embedder.model, input=[[5, 6], [7]], dimensions=8)
    assert [len(entry.embedding) for entry in first.data] == [8, 8]
    assert first.usage.prompt_tokens == first.usage.total_tokens == 3
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        embedder.client.embeddings.create(model=embedder.model, input="x", dimensions=HIDDEN + 1)
    with pytest.raises(openai.NotFoundError, match="makes embeddings"):
        embedder.client.completions.create(model=embedder.model, prompt="x")


def test_many_texts_of_several_clients_at_once(embedder: Frontend, model: Any) -> None:
    """What belongs to whom does not depend on who asks beside; all blocks are free at the end."""
    texts = [f"{word} {number}" for number in range(60) for word in ("fish", "ship " * 40)]
    expected = expect(embedder, model, texts[:4])
    answers: list[Any] = []

    def ask() -> None:
        answers.append(embedder.client.embeddings.create(model=embedder.model, input=texts))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    found = np.array([[entry.embedding for entry in answer.data] for answer in answers])
    assert np.abs(found - found[:1]).max() < 1e-5
    assert np.abs(found[0, :4] - np.array(expected)).max() < 1e-5
    embedder.wait_until_idle()
    assert embedder.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_takes_its_texts_with_it(embedder: Frontend) -> None:
    with pytest.raises(openai.APITimeoutError):
        embedder.client.with_options(timeout=0.05).embeddings.create(model=embedder.model, input=["y " * 250] * 150)
    embedder.wait_until_idle()
    assert embedder.client.embeddings.create(model=embedder.model, input="x").data[0].embedding


@pytest.mark.long
def test_langchains_embeddings(embedder: Frontend, model: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="the extra 'clients' is not installed")
    options: Any = {"model": embedder.model, "base_url": f"{embedder.url}/v1", "api_key": "none"}
    embeddings = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False, chunk_size=3)
    expected = expect(embedder, model, TEXTS)
    for values, wanted in zip(embeddings.embed_documents(TEXTS), expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-5)
    assert embeddings.embed_query(TEXTS[0]) == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.long
def test_ranks_over_http_are_transformers(tmp_path: Path) -> None:
    model = save_reranker(tmp_path)
    with run_engine(str(tmp_path), *_SIZES, "--convert=classify") as engine:
        frontend = start_frontend(engine.region, f"--model={tmp_path}")
        documents = ["One fish, two fish.", {"text": "Paris"}, "red " * 30]
        ranked = frontend.post("/v1/rerank", query="fish?", documents=documents).json()["results"]
        pairs = frontend.post("/v1/score", text_1="fish?", text_2=["One fish, two fish.", "Paris", "red " * 30]).json()
        stop(frontend.process)
    scores = [entry["score"] for entry in pairs["data"]]
    # Not bit by bit: prompts share steps as they come.
    assert [result["relevance_score"] for result in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-6)
    assert [scores[result["index"]] for result in ranked] == sorted(scores, reverse=True)
    from blink import LLM

    with LLM(str(tmp_path), dtype="float32", convert="classify") as llm:
        outputs = llm.score("fish?", ["One fish, two fish.", "Paris", "red " * 30], use_tqdm=False)
    assert scores == pytest.approx([score(model, output.prompt_token_ids) for output in outputs], abs=1e-5)
