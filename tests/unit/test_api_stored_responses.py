# SPDX-License-Identifier: Apache-2.0
"""Stored responses: who finds them, what goes on from them, how many there are, and what runs in the background."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blink.api.openai.responses import background
from blink.api.serving import response_store
from blink.api.serving.response_store import IN_PROGRESS, Keeper, Kept, ResponseStore, StoreLease, StoreLimits
from blink.config import FrontendConfig
from blink.errors import ConfigError, OverloadedError
from blink.text.assets import ModelAssets, load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

PATH = "/v1/responses"
CONFIG = FrontendConfig(model=MODEL, region="test-stored", api_key=("one", "two"))
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in CONFIG.api_key)


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def server(assets: ModelAssets, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, assets, tmp_path)
    yield server
    server.close()


def respond(server: FakeServer, headers: Any = ONE, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "Hi", **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def status_of(server: FakeServer, method: str, path: str, headers: Any = ONE, **options: Any) -> int:
    answer = server.send(method, f"{PATH}/{path}", headers=headers, **options)
    assert answer.status_code == 200 or "error" in answer.json()
    return answer.status_code


def test_a_response_is_found_by_its_key_alone(server: FakeServer) -> None:
    made = respond(server, metadata={"a": "b"})
    name = made["id"]
    assert made["store"] is True and server.send("GET", f"{PATH}/{name}", headers=ONE).json() == made
    for method, path in (
        ("GET", name),
        ("DELETE", name),
        ("POST", f"{name}/cancel"),
        ("GET", f"{name}/input_items"),
    ):
        assert status_of(server, method, path, TWO) == 404
        assert status_of(server, method, path, {}) == 401
    answer = server.post(PATH, {"input": "Hi", "previous_response_id": name}, headers=TWO)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")
    assert status_of(server, "GET", name) == 200
    assert server.send("DELETE", f"{PATH}/{name}", headers=ONE).json()["deleted"] is True
    assert status_of(server, "GET", name) == status_of(server, "DELETE", name) == 404


def test_ids_cannot_be_chosen_where_they_are_keys(server: FakeServer) -> None:
    for fields, headers in (({"request_id": "mine"}, ONE), ({}, {**ONE, "X-Request-Id": "mine"})):
        name = respond(server, headers, **fields)["id"]
        assert "mine" not in name and len(name) == len("resp_") + 32
    assert respond(server, request_id="mine", store=False)["id"] == "resp_mine"


def test_a_stream_is_stored_too_and_what_shall_not_be_is_not(server: FakeServer) -> None:
    server.post(PATH, {"input": "Hi", "stream": True}, headers=ONE)
    name = server.writer.written.decode().split('"id":"')[1].split('"')[0]
    assert status_of(server, "GET", name) == 200
    unkept = respond(server, store=False)
    assert unkept["store"] is False and status_of(server, "GET", unkept["id"]) == 404


def test_a_conversation_goes_on_behind_a_stored_one(server: FakeServer) -> None:
    first = respond(server, instructions="Be brief.")
    second = respond(server, input=[{"role": "user", "content": "And?"}], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    said = first["output"][0]["content"][0]["text"]
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And?"},
    ]
    prompts = [list(submitted.prompt) for submitted in server.engine.submitted]
    respond(server, input=talk, store=False)
    assert list(server.engine.submitted[-1].prompt) == prompts[1] != prompts[0]  # instructions are not inherited
    third = respond(server, input="So?", previous_response_id=second["id"])
    listed = server.send("GET", f"{PATH}/{third['id']}/input_items?order=asc", headers=ONE).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["Hi", said, "And?", second["output"][0]["content"][0]["text"], "So?"]
    counted = server.post(
        f"{PATH}/input_tokens", {"input": "So?", "previous_response_id": second["id"]}, headers=ONE
    ).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]}


def test_a_long_stored_conversation_is_read_elsewhere(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = respond(server)
    monkeypatch.setattr("blink.api.openai.responses.read._LIGHT_BYTES", 10)
    queued: list[str] = []

    async def run(_: object, job: Any) -> Any:
        queued.append(job.kind)
        return server.service.reader  # never read: the request is refused below

    monkeypatch.setattr("blink.api.reader.Reader._run", run)
    assert server.post(PATH, {"input": "x", "previous_response_id": first["id"]}, headers=ONE).status_code == 500
    assert queued == ["responses"]


def test_input_items_come_by_pages(server: FakeServer) -> None:
    items = [{"role": "user", "content": f"{place}"} for place in range(5)]
    name = respond(server, input=items)["id"]
    url = f"{PATH}/{name}/input_items"
    page = server.send("GET", f"{url}?limit=2", headers=ONE).json()
    assert [item["content"] for item in page["data"]] == [[{"type": "input_text", "text": n}] for n in ("4", "3")]
    assert (page["object"], page["has_more"], page["last_id"]) == ("list", True, page["data"][1]["id"])
    rest = server.send("GET", f"{url}?after={page['last_id']}", headers=ONE).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    end = server.send("GET", f"{url}?after={rest['last_id']}", headers=ONE).json()
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    for query in ("limit=0", "limit=101", "order=odd", "after=nobody", "limit=x"):
        assert 400 <= status_of(server, "GET", f"{name}/input_items?{query}") < 500
    assert status_of(server, "GET", f"{name}?stream=true") == 400


def test_the_background_makes_a_response_that_is_fetched(server: FakeServer) -> None:
    async def run() -> tuple[Any, Any]:
        begun = await server.send_soon("POST", PATH, json={"input": "Hi", "background": True}, headers=ONE)
        url = f"{PATH}/{begun.json()['id']}"
        return begun.json(), (await server.send_soon("GET", url, headers=ONE)).json()

    begun, fetched = asyncio.run(run())
    assert (begun["status"], begun["output"], begun["usage"], begun["background"]) == ("queued", [], None, True)
    assert fetched["id"] == begun["id"] and fetched["status"] in ("incomplete", "queued")


@pytest.mark.parametrize("how", ["cancel", "delete", "fail"])
def test_the_background_ends_when_nobody_waits(server: FakeServer, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOOK_SECONDS", 0.001)
    server.engine.is_silent = True

    async def run() -> Any:
        begun = await server.send_soon("POST", PATH, json={"input": "Hi", "background": True}, headers=ONE)
        url = f"{PATH}/{begun.json()['id']}"
        refused = {"input": "x", "previous_response_id": begun.json()["id"]}
        assert (await server.send_soon("POST", PATH, json=refused, headers=ONE)).status_code == 400
        if how == "cancel":
            answer = (await server.send_soon("POST", f"{url}/cancel", headers=ONE)).json()
            assert answer["status"] == "cancelled"
        elif how == "delete":
            await server.send_soon("DELETE", url, headers=ONE)
        else:
            server.service.poller.table.fail_all(OverloadedError("It broke."))
        while server.service.poller.table.num_open:
            await asyncio.sleep(0.001)
        return await server.send_soon("GET", url, headers=ONE)

    answer = asyncio.run(run())
    assert server.engine.cancelled or how == "fail"
    if how == "delete":
        assert answer.status_code == 404
    else:
        assert answer.json()["status"] == {"cancel": "cancelled", "fail": "failed"}[how]
        assert answer.json()["output"] == []
    if how == "fail":
        assert answer.json()["error"]["message"] == "It broke."


def test_only_what_is_made_in_the_background_can_be_cancelled(server: FakeServer) -> None:
    assert status_of(server, "POST", f"{respond(server)['id']}/cancel") == 400


@pytest.mark.parametrize("fields", [{"background": True}, {"previous_response_id": "resp_1"}])
def test_without_a_store_nothing_is_kept(assets: ModelAssets, tmp_path: Path, fields: dict[str, Any]) -> None:
    server = FakeServer(replace(CONFIG, response_store_size=0), assets, tmp_path)
    answer = server.post(PATH, {"input": "Hi", **fields}, headers=ONE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
    made = respond(server)
    assert made["store"] is False and status_of(server, "GET", made["id"]) == 404
    server.close()


def open_store(folder: Path, *, count: int = 10, size: int = 10_000, share: float = 0.5) -> ResponseStore:
    return ResponseStore(StoreLimits(str(folder / "s.sqlite"), count, size, share))


def kept(size: int = 10) -> Kept:
    return Kept("completed", b"[]", b"x" * (size - 2))


def held(store: ResponseStore, owner: bytes) -> list[int]:
    return [place for place in range(30) if store.get(owner, str(place)) is not None]


def test_the_newest_are_kept_by_number_for_each_key_and_for_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for place in range(8):
        store.put(b"a", str(place), kept())
    assert held(store, b"a") == [3, 4, 5, 6, 7]
    for place in range(4):
        store.put(b"b", str(place), kept())
    assert held(store, b"a") == [3, 4, 5, 6, 7]  # another key takes none of a key's
    for place in range(4):
        store.put(b"c", str(place), kept())
    assert (held(store, b"a"), held(store, b"b"), held(store, b"c")) == ([6, 7], [0, 1, 2, 3], [0, 1, 2, 3])
    for place in range(20):
        store.put(b"", str(place), kept())  # without keys all is everybody's
    assert held(store, b"") == list(range(10, 20)) and held(store, b"c") == []


def test_the_newest_are_kept_by_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path, count=1000)
    for place in range(8):
        store.put(b"a", str(place), kept(2000))
    assert held(store, b"a") == [6, 7]
    store.put(b"a", "20", kept(6000))  # larger than the share of its key
    assert held(store, b"a") == []
    store.put(b"b", "0", kept(4000))
    assert held(store, b"b") == [0]


def test_workers_share_the_file_and_nobody_else_reads_it(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    one.put(b"a", "x", Kept(IN_PROGRESS, b"[1]", b"{}"))
    assert two.get(b"a", "x") == Kept(IN_PROGRESS, b"[1]", b"{}") and two.is_in_progress(b"a", "x")
    assert two.settle(b"a", "x", "cancelled", b"{2}")
    assert not one.settle(b"a", "x", "completed", b"{3}") and not one.is_in_progress(b"a", "x")
    assert one.get(b"a", "x") == Kept("cancelled", b"[1]", b"{2}") and one.get(b"b", "x") is None
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_who_has_to_wait_for_another_worker_lets_a_thread_do_it(tmp_path: Path) -> None:
    limits = StoreLimits(str(tmp_path / "s.sqlite"), 10, 10_000, 0.5)
    store, other = ResponseStore(limits, 0.0), sqlite3.connect(limits.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    keeper = Keeper(store, b"a", "x", b"[]")
    with pytest.raises(OverloadedError):
        keeper.begin(b"{}")
    keeper.keep("completed", b"{1}")
    assert store.get(b"a", "x") is None and keeper.is_wanted is False
    other.execute("COMMIT")
    response_store._LATER.submit(lambda: None).result(10)  # behind it
    assert store.get(b"a", "x") == Kept("completed", b"[]", b"{1}")


def test_a_store_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.write_text("no database at all, but some text that is long enough to be read as one" * 20)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be kept"):
        open_store(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        open_store(tmp_path)


def test_the_last_worker_takes_the_file_with_it(tmp_path: Path) -> None:
    first = StoreLease("r", tmp_path)
    first.path.write_text("x")
    second = StoreLease("r", tmp_path)
    assert first.path == second.path and second.path.exists()
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()
    second.path.write_text("left by a server that was killed")
    StoreLease("r", tmp_path).close()
    assert not second.path.exists() and [path.name for path in second.path.parent.iterdir()] == ["r.lock"]
