# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, /v1/rerank and /v1/score in front of an engine whose vectors the test chooses."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blink.config import FrontendConfig
from blink.region.layout import FinishReason, Task
from blink.text.assets import load_assets
from fake_engine import ENGINE, FakeServer
from pooling_engine import WIDTH, PoolingEngine
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-pooling")


ASSETS = functools.cache(load_assets)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Task, FakeServer]]:
    servers = {
        task: FakeServer(CONFIG, ASSETS(CONFIG), tmp_path_factory.mktemp(task.name), PoolingEngine(task))
        for task in (Task.EMBED, Task.SCORE)
    }
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture
def embedder(servers: dict[Task, FakeServer]) -> FakeServer:
    return begin_anew(servers[Task.EMBED])


@pytest.fixture
def scorer(servers: dict[Task, FakeServer]) -> FakeServer:
    return begin_anew(servers[Task.SCORE])


def begin_anew(server: FakeServer) -> FakeServer:
    assert isinstance(server.engine, PoolingEngine)
    server.engine.say(())
    return server


def embedding_of(length: int, dimensions: int = WIDTH) -> list[float]:
    vector = np.array([length, 0, 1, 0, 0, 0], np.float32)[:dimensions]
    return (vector / np.linalg.norm(vector)).tolist()


@pytest.mark.parametrize(
    ("value", "lengths"),
    [([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2]), (["Hello", "Hello there, world!"], None), ("Hello", None)],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_embeddings_of_all_forms_of_input(embedder: FakeServer, value: Any, lengths: Any, path: str) -> None:
    response = embedder.post(path, {"model": "m", "input": value, "user": "u"})
    assert response.status_code == 200, response.text
    body = response.json()
    submitted = [len(each.prompt) for each in embedder.engine.submitted]
    assert lengths in (None, submitted)
    assert [entry["index"] for entry in body["data"]] == list(range(len(submitted)))
    for entry, length in zip(body["data"], submitted, strict=True):
        assert entry["object"] == "embedding"
        assert entry["embedding"] == pytest.approx(embedding_of(length), rel=1e-6)
    total = sum(submitted)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == total
    assert (body["object"], body["model"], body["id"][:5]) == ("list", "m", "embd-")
    params = embedder.engine.submitted[0].params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, None, None)


def test_base64_holds_the_same_floats(embedder: FakeServer) -> None:
    shown = embedder.post("/v1/embeddings", {"input": [5, 6]}).json()["data"][0]["embedding"]
    coded = embedder.post("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}).json()
    found = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert found.tolist() == pytest.approx(shown, rel=1e-7)


def test_fewer_dimensions_and_raw_numbers(embedder: FakeServer) -> None:
    def first(**fields: Any) -> Any:
        return embedder.post("/v1/embeddings", {"input": [7] * 5, **fields}).json()["data"][0]["embedding"]

    assert first(dimensions=2) == pytest.approx([1, 0])
    assert first(dimensions=3) == pytest.approx(embedding_of(5, 3), rel=1e-6)
    assert first(normalize=False) == first(use_activation=False) == [5, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 9),
        ({"truncate_prompt_tokens": 4}, 4),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, 4),
        ({"truncate_prompt_tokens": -1}, 9),
    ],
)
def test_truncation_keeps_the_end_unless_told(embedder: FakeServer, fields: dict[str, Any], length: int) -> None:
    tokens = list(range(10, 19))
    assert embedder.post("/v1/embeddings", {"input": tokens, **fields}).status_code == 200
    kept = embedder.engine.submitted[0].prompt.tolist()
    assert kept == (tokens[:length] if fields.get("truncation_side") else tokens[-length:])


def test_a_prompt_may_fill_the_context(embedder: FakeServer) -> None:
    longest = ENGINE.max_model_len
    assert embedder.post("/v1/embeddings", {"input": [5] * longest}).status_code == 200
    response = embedder.post("/v1/embeddings", {"input": [5] * (longest + 1)})
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]
    cut = embedder.post("/v1/embeddings", {"input": [5] * (longest + 9), "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == longest


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [1 << 40]}, "input"),
        ({"input": [[1], [99999]]}, "input"),
        ({"input": ["x"] * 9}, "input"),
        ({"input": "\ud800"}, None),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 7}, "dimensions"),
        ({"input": "x", "dimensions": "3"}, "dimensions"),
        ({"input": "x", "dimensions": 2.5}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"input": "x", "priority": 3}, "priority"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "x", "request_id": "a\nb"}, "request_id"),
    ],
)
def test_bad_embedding_requests_are_refused_by_their_field(
    embedder: FakeServer, fields: dict[str, Any], param: str | None
) -> None:
    content = json.dumps(fields)
    response = embedder.send("POST", "/v1/embeddings", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    found = response.json()["error"]["param"]
    assert param is None or (found or "").split(".")[0] == param, response.text
    assert not embedder.engine.submitted


DOCUMENTS = ["a", "One fish, two fish, red fish, blue fish.", {"text": "Paris is in France"}]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked(scorer: FakeServer, path: str) -> None:
    body = scorer.post(path, {"model": "m", "query": "fish?", "documents": DOCUMENTS}).json()
    lengths = [len(each.prompt) for each in scorer.engine.submitted]
    expected = sorted(range(3), key=lambda index: -lengths[index])
    assert [result["index"] for result in body["results"]] == expected == [1, 2, 0]
    for result in body["results"]:
        logit = (lengths[result["index"]] - 100) / 50
        assert result["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)
        assert result["document"]["text"] in ("a", DOCUMENTS[1], "Paris is in France")
    assert body["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert body["usage"]["total_tokens"] == sum(lengths)
    assert body["id"].startswith("rerank-") and body["model"] == "m"


def test_the_best_documents_without_their_texts(scorer: FakeServer) -> None:
    fields = {"query": "q", "documents": DOCUMENTS, "top_n": 2, "return_documents": False, "use_activation": False}
    body = scorer.post("/v1/rerank", fields).json()
    assert [result["index"] for result in body["results"]] == [1, 2]
    assert "document" not in body["results"][0]
    assert scorer.post("/v1/rerank", {**fields, "top_n": 0}).json()["results"][2]["index"] == 0


def test_equal_documents_keep_their_order(scorer: FakeServer) -> None:
    body = scorer.post("/v1/rerank", {"query": "q", "documents": ["aa"] * 4, "top_n": 3}).json()
    assert [result["index"] for result in body["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"text_1": "q", "text_2": ["a", "b c d e f"]},
        {"text_1": ["q", "q"], "text_2": ["a", "b c d e f"]},
        {"queries": "q", "documents": ["a", "b c d e f"]},
        {"data_1": "q", "data_2": ["a", "b c d e f"]},
        {"queries": "q", "items": ["a", "b c d e f"]},
    ],
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored(scorer: FakeServer, fields: dict[str, Any], path: str) -> None:
    body = scorer.post(path, fields).json()
    lengths = [len(each.prompt) for each in scorer.engine.submitted]
    assert len(lengths) == 2 and lengths[0] < lengths[1]
    for index, entry in enumerate(body["data"]):
        expected = 1 / (1 + np.exp(-(lengths[index] - 100) / 50))
        assert (entry["index"], entry["object"]) == (index, "score")
        assert entry["score"] == pytest.approx(expected, rel=1e-5)
    assert (body["object"], body["id"][:6]) == ("list", "score-")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 9}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [{"image": "x"}]}, "documents"),
        ("/v1/rerank", {"query": ["q"], "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a" * 100000]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "q", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": {"content": []}}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": ["a"] * 9}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": "a", "activation": True}, "activation"),
    ],
)
def test_bad_rankings_are_refused_by_their_field(
    scorer: FakeServer, path: str, fields: dict[str, Any], param: str
) -> None:
    response = scorer.post(path, fields)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").split(".")[0] == param, response.text
    assert not scorer.engine.submitted


@pytest.mark.parametrize(
    ("task", "path", "fields", "word"),
    [
        (Task.EMBED, "/v1/completions", {"prompt": "x"}, "makes embeddings"),
        (Task.EMBED, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "makes embeddings"),
        (Task.EMBED, "/v1/rerank", {"query": "q", "documents": ["a"]}, "makes embeddings"),
        (Task.SCORE, "/v1/embeddings", {"input": "x"}, "scores texts"),
        (Task.SCORE, "/v1/completions", {"prompt": "x"}, "scores texts"),
    ],
)
def test_what_the_model_is_not_for_is_404(
    servers: dict[Task, FakeServer], task: Task, path: str, fields: Any, word: str
) -> None:
    response = servers[task].post(path, fields)
    assert response.status_code == 404
    assert word in response.json()["error"]["message"]


def test_a_model_that_generates_makes_no_embeddings(tmp_path: Any) -> None:
    server = FakeServer(CONFIG, ASSETS(CONFIG), tmp_path)
    for path, fields in (("/v1/embeddings", {"input": "x"}), ("/score", {"text_1": "a", "text_2": "b"})):
        response = server.post(path, fields)
        assert response.status_code == 404 and "generates text" in response.json()["error"]["message"]
    server.close()


def test_numbers_that_are_not_finite_are_the_servers_fault(
    embedder: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder.engine, "reason", FinishReason.ERROR)
    response = embedder.post("/v1/embeddings", {"input": "x"})
    assert response.status_code == 500
    assert "no finite numbers" in response.json()["error"]["message"]


def test_tokens_are_counted_by_the_same_server(embedder: FakeServer) -> None:
    assert embedder.post("/tokenize", {"prompt": "Hello"}).status_code == 200
