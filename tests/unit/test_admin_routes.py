# SPDX-License-Identifier: Apache-2.0
"""Who may change a server, and how a pause is asked for and answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from blink.api.admin.rights import ADMIN_PATHS
from blink.api.admin.tensor_schema import list_tensors
from blink.config import FrontendConfig
from blink.errors import BadRequestError
from blink.region.layout import Absent, Drop, Opcode, PauseMode
from blink.text.assets import load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

CONFIG = FrontendConfig(
    model=MODEL,
    region="test-admin",
    api_key=("client",),
    admin_api_key=("master",),
    enable_admin_endpoints=True,
)
MASTER: dict[str, Any] = {"headers": {"Authorization": "Bearer master"}}
CLIENT: dict[str, Any] = {"headers": {"x-api-key": "client"}}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    yield from open_server(CONFIG, tmp_path_factory)


def open_server(config: FrontendConfig, folders: pytest.TempPathFactory) -> Iterator[FakeServer]:
    server = FakeServer(config, load_assets(config), folders.mktemp("admin"))
    yield server
    server.close()


PLACE = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a"], "shapes": [[1]]}
# Sound bodies of what changes the engine's model.
BODIES: dict[str, Any] = {
    "/sleep": {},
    "/wake_up": {},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": b"stream",
    "/init_weights_update_group": {**PLACE, "backend": "gloo"},
    "/destroy_weights_update_group": {},
    "/update_weights_from_distributed": {**TENSORS, "dtypes": ["float32"]},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weight_transfer_engine": {"init_info": PLACE},
    "/start_weight_update": {},
    "/update_weights": {"update_info": {**TENSORS, "dtype_names": ["float32"]}},
    "/finish_weight_update": {},
}


def ask(server: FakeServer, path: str, **options: Any) -> httpx.Response:
    """Send a sound request to a path that changes the server, or tells how it is."""
    body = BODIES.get(path)
    if isinstance(body, bytes):
        options["content"] = body
        options["headers"] = {**options.get("headers", {}), "Content-Type": "application/octet-stream"}
    elif body:
        options["json"] = body
    return server.send("GET" if path.startswith(("/is_", "/get_")) else "POST", path, **options)


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_only_an_admin_key_opens_what_changes_the_server(server: FakeServer, path: str) -> None:
    assert ask(server, path, **CLIENT).status_code == 401
    assert ask(server, path).status_code == 401
    assert server.engine.paused == []
    # The fake engine takes no orders about its model.
    changes_model = path in BODIES or path == "/get_world_size"
    assert ask(server, path, **MASTER).status_code == (400 if changes_model else 200)


LOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by the lacking flag: the change, and who asks
    "--enable-admin-endpoints": ({"enable_admin_endpoints": False}, MASTER),
    "--admin-api-key": ({"admin_api_key": ()}, CLIENT),
}


@pytest.fixture(scope="module", params=LOCKS)
def locked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, FakeServer]]:
    """A server of which nothing can be changed, and what it lacks; no request changes that."""
    change, _ = LOCKS[request.param]
    for server in open_server(replace(CONFIG, **change), tmp_path_factory):
        yield request.param, server


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_without_the_flag_or_a_key_each_path_says_what_it_needs(locked: tuple[str, FakeServer], path: str) -> None:
    flag, server = locked
    response = ask(server, path, **LOCKS[flag][1])
    assert response.status_code == 404 and flag in response.json()["error"]["message"]
    assert server.engine.paused == []


def test_vllms_variable_switches_it_on_and_ours_holds_a_key(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("BLINK_ADMIN_API_KEY", "from outside")
    for server in open_server(replace(CONFIG, admin_api_key=(), enable_admin_endpoints=False), tmp_path_factory):
        headers = {"Authorization": "Bearer from outside"}
        assert server.send("GET", "/is_paused", headers=headers).json() == {"is_paused": False}


def test_an_admin_key_is_a_clients_key_too_and_changes_adapters_alone(server: FakeServer) -> None:
    assert server.send("GET", "/v1/models", **MASTER).status_code == 200
    assert server.send("POST", "/v1/unload_lora_adapter", json={"lora_name": "a"}, **CLIENT).status_code == 401
    assert server.send("POST", "/v1/unload_lora_adapter", json={"lora_name": "a"}, **MASTER).status_code == 404


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (PauseMode.ABORT, Drop.PREFIX_CACHE)),
        ("?mode=wait", (PauseMode.WAIT, Drop.PREFIX_CACHE)),
        ("?mode=keep&clear_cache=false", (PauseMode.KEEP, Drop.NOTHING)),
        ("?wait_for_inflight_requests=true", (PauseMode.WAIT, Drop.PREFIX_CACHE)),
    ],
)
def test_vllms_pause_has_its_modes(server: FakeServer, query: str, asked: tuple[PauseMode, Drop]) -> None:
    assert server.send("POST", "/pause" + query, **MASTER).json() == {"status": "paused"}
    assert server.engine.paused == [asked]
    assert server.send("GET", "/is_paused", **MASTER).json() == {"is_paused": True}
    assert server.send("POST", "/resume", **MASTER).json() == {"status": "resumed"}
    assert server.send("GET", "/is_paused", **MASTER).json() == {"is_paused": False}


@pytest.mark.parametrize(("mode", "asked"), [("in_place", PauseMode.KEEP), ("retract", PauseMode.RETRACT)])
def test_sglangs_pause_has_its_modes(server: FakeServer, mode: str, asked: PauseMode) -> None:
    answer = server.send("POST", "/pause_generation", json={"mode": mode}, **MASTER).json()
    assert answer == {"message": "Generation paused successfully.", "status": "ok"}
    assert server.engine.paused == [(asked, Drop.NOTHING)]
    assert server.send("POST", "/continue_generation", **MASTER).json()["status"] == "ok"
    assert not server.engine.is_paused


def test_a_foreign_pages_post_is_refused(server: FakeServer) -> None:
    headers = {**MASTER["headers"], "Origin": "https://evil.example", "Content-Type": "text/plain"}
    assert server.send("POST", "/pause", headers=headers, content="x").status_code in (400, 403, 415)
    assert server.engine.paused == []


@pytest.mark.parametrize("bit", [bit for bit in Absent if bit])
def test_an_engine_whose_model_is_not_whole_does_not_go_on(server: FakeServer, bit: Absent) -> None:
    server.send("POST", "/pause", **MASTER)
    server.engine.absent = int(bit)
    response = server.send("POST", "/resume", **MASTER)
    assert response.status_code == 400 and "cannot go on" in response.json()["error"]["message"]
    assert server.engine.is_paused


def test_a_pause_that_somebody_took_back_is_told(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    order = server.engine.order
    monkeypatch.setattr(server.engine, "order", lambda *asked, **how: (order(*asked, **how), order(Opcode.RESUME)))
    response = server.send("POST", "/pause", **MASTER)
    assert response.status_code == 503 and "resumed" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_takes_no_orders_about_its_model_is_not_paused_for_them(server: FakeServer, path: str) -> None:
    response = ask(server, path, **MASTER)
    assert "docs/pause.md says which engines do" in response.json()["error"]["message"]
    assert server.engine.paused == []


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, "pickles"),
        ("/init_weights_update_group", {**PLACE, "backend": "mpi"}, "backend"),
        ("/init_weights_update_group", {**PLACE, "backend": "gloo", "rank_offset": 0}, "rank_offset"),
        ("/update_weights", {"update_info": {**TENSORS, "dtype_names": ["float32"], "packed": True}}, "packed"),
        (
            "/update_weights",
            {"update_info": {**TENSORS, "dtype_names": ["bool"], "ipc_handles_pickled": "gASV"}},
            "ipc",
        ),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/update_weights_from_ipc", {"zmq_handles": {}}, "pickles"),
    ],
)
def test_what_a_trainer_asks_and_is_not_here_is_refused_by_name(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr("blink.api.admin.model_routes.check_obeys", lambda _: None)
    response = server.send("POST", path, json=body, **MASTER)
    assert response.status_code in (400, 404) and named in response.text
    assert server.engine.paused == []


@pytest.mark.parametrize(("types", "shapes"), [(["float32", "float32"], [[1]]), (["float32"], []), (["x"], [[1]])])
def test_lists_of_tensors_that_do_not_agree_are_refused(types: list[str], shapes: list[list[int]]) -> None:
    with pytest.raises(BadRequestError):
        list_tensors(["a"], types, shapes)
