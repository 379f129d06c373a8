# SPDX-License-Identifier: Apache-2.0
"""The handshake that sets an RDMA connection up, over a pair of sockets; no RDMA device takes part."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.errors import BlinkError, ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.link.rdma import message as rdma_message
from blink.link.rdma.handshake import (
    VERSION,
    BackendMismatchError,
    Descriptor,
    RefusedError,
    admit,
    negotiate,
    parse_place,
    prove,
    read_token,
)
from blink.link.rdma.message import (
    HandshakeError,
    Lines,
    Message,
    RemoteMemory,
    struct_from_message,
    struct_to_message,
)
from blink.link.rdma.nixl_link import NixlLink, parse_metadata
from blink.link.rdma.verbs import EndInfo
from blink.rdma_config import RdmaConfig
from blink.region.layout import DIGEST
from ports import free_port

GID = (type(EndInfo().gid))(*range(16))
INFO = EndInfo(GID, 17, 0xABCDEF, 3, 5)
OWN = struct_to_message(INFO)
DESCRIPTOR = Descriptor(
    {"of": "the engine"}, RemoteMemory(0, 1000, 1 << 47, 7, 0), RemoteMemory(4096, 9 << 20, 1 << 46, 8, 0), 2, 1 << 63
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def in_thread(body: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def shake_hands(
    ends: tuple[socket.socket, socket.socket], prepare: Callable[[Message], Descriptor], token: str = "secret"
) -> tuple[Descriptor | BlinkError, list[BaseException]]:
    """Let both ends talk; return what the frontend has, and what went wrong at the engine's end."""
    thread, errors = in_thread(lambda: admit(Lines(ends[0]), "secret", "verbs", prepare))
    try:
        got: Descriptor | BlinkError = negotiate(Lines(ends[1]), token, "verbs", OWN)
    except BlinkError as error:
        got = error
    thread.join()
    return got, errors


def answer_with(ends: tuple[socket.socket, socket.socket], *lines: bytes) -> None:
    """Play an engine that says these lines whatever it hears."""
    ends[0].sendall(b"".join(lines))


def greeting(**changes: Any) -> bytes:
    return json.dumps({"blink": VERSION, "digest": f"{DIGEST:x}", "nonce": "00", **changes}).encode() + b"\n"


def test_both_ends_learn_all_that_the_other_says(ends: tuple[socket.socket, socket.socket]) -> None:
    heard: list[Message] = []

    def prepare(end: Message) -> Descriptor:
        heard.append(end)
        return DESCRIPTOR

    got, errors = shake_hands(ends, prepare)
    assert errors == [] and isinstance(got, Descriptor)
    assert heard == [OWN] and got.end == DESCRIPTOR.end
    assert (bytes(got.shared), bytes(got.pair)) == (bytes(DESCRIPTOR.shared), bytes(DESCRIPTOR.pair))
    assert (got.pair_index, got.epoch) == (2, 1 << 63)


def test_a_client_that_reaches_itself_is_refused_and_leaves_the_port_free(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("127.0.0.1", free_port())
    create = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, timeout: create(to, timeout, source_address=place))
    with pytest.raises(ConnectionRefusedError):
        rdma_message.connect(place)
    socket.create_server(place).close()


def test_a_struct_travels_unchanged() -> None:
    assert bytes(struct_from_message(EndInfo, json.loads(json.dumps(OWN)))) == bytes(INFO)


def test_a_frontend_with_another_token_is_refused_and_gets_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    prepared: list[Message] = []
    got, errors = shake_hands(ends, prepared.append, token="guess")  # type: ignore[arg-type]
    assert isinstance(got, RefusedError) and isinstance(errors[0], RefusedError) and prepared == []


def test_what_the_engine_cannot_give_reaches_the_frontend_as_it_is(ends: tuple[socket.socket, socket.socket]) -> None:
    def prepare(_: Message) -> Descriptor:
        raise EngineUnavailableError("all taken")

    got, _ = shake_hands(ends, prepare)
    assert isinstance(got, EngineUnavailableError) and got.message == "all taken"


def test_another_build_is_refused_by_the_frontend(ends: tuple[socket.socket, socket.socket]) -> None:
    answer_with(ends, greeting(digest="1"))
    with pytest.raises(LayoutMismatchError):
        negotiate(Lines(ends[1]), "secret", "verbs", OWN)


def test_another_build_is_refused_by_the_engine(ends: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = in_thread(lambda: admit(Lines(ends[0]), "secret", "verbs", lambda _: DESCRIPTOR))
    frontend = Lines(ends[1])
    nonce = frontend.receive()["nonce"]
    frontend.send({"digest": "1", "proof": prove("secret", str(nonce)), "end": {}})
    assert frontend.receive()["refused"] == "build"
    thread.join()
    assert isinstance(errors[0], LayoutMismatchError)


MEMORY = struct_to_message(RemoteMemory())


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"end": 5},
        {"end": {}, "shared": MEMORY, "pair_index": 0, "epoch": 1},
        {"end": {}, "shared": MEMORY, "pair": {**MEMORY, "key": 1 << 32}, "pair_index": 0, "epoch": 1},
        {"end": {}, "shared": MEMORY, "pair": MEMORY, "pair_index": True, "epoch": 1},
        {"refused": "something new", "message": "?"},
    ],
)
def test_a_nonsense_answer_is_an_error(ends: tuple[socket.socket, socket.socket], answer: dict[str, Any]) -> None:
    answer_with(ends, greeting(), json.dumps(answer).encode() + b"\n")
    with pytest.raises(HandshakeError):
        negotiate(Lines(ends[1]), "secret", "verbs", OWN)


@pytest.mark.parametrize(
    "end",
    [
        {"gid": "zz", "qpn": 1, "psn": 1, "lid": 0, "mtu": 1},
        {"gid": "00", "qpn": 1, "psn": 1, "lid": 0, "mtu": 1},
        {"gid": "00" * 16, "qpn": 1 << 32, "psn": 1, "lid": 0, "mtu": 1},
        {"gid": "00" * 16, "qpn": True, "psn": 1, "lid": 0, "mtu": 1},
        {"gid": "00" * 16, "qpn": 1, "psn": 1, "lid": 0},
    ],
)
def test_an_end_that_is_none_is_an_error(end: Message) -> None:
    with pytest.raises(HandshakeError):
        struct_from_message(EndInfo, end)


@pytest.mark.parametrize("line", [b"x" * 5000, b"[]\n", b"{\n", b"\xff\n", b""])
def test_a_line_that_is_no_message_is_an_error(ends: tuple[socket.socket, socket.socket], line: bytes) -> None:
    ends[0].sendall(line)
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeError):
        Lines(ends[1]).receive()


def test_a_peer_that_says_nothing_is_given_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_message, "TIMEOUT", 0.2)
    with pytest.raises(TimeoutError):
        Lines(ends[1]).receive()


def test_the_token_never_travels_and_each_proof_is_for_one_connection() -> None:
    assert "secret" not in prove("secret", "1") and prove("secret", "1") != prove("secret", "2")


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLINK_RDMA_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="secret"):
        read_token(RdmaConfig())
    monkeypatch.setenv("BLINK_RDMA_TOKEN", "one")
    assert read_token(RdmaConfig()) == "one"
    (tmp_path / "token").write_text("two\n")
    assert read_token(RdmaConfig(rdma_token_file=str(tmp_path / "token"))) == "two"
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(RdmaConfig(rdma_token_file=str(tmp_path / "none")))


@pytest.mark.parametrize(("text", "place"), [("a.b:7000", ("a.b", 7000)), ("[::1]:1", ("::1", 1))])
def test_a_place_is_a_host_and_a_port(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text, "--rdma") == place


@pytest.mark.parametrize("text", ["7000", ":7000", "host", "host:", "host:x", "host:70000"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_place(text, "--rdma")


def test_serve_refuses_a_foreign_engine() -> None:
    with pytest.raises(ConfigError, match="blink frontend"):
        ServeConfig(engine=EngineConfig(), frontend=FrontendConfig(rdma_engine="host:1"))


def test_without_the_library_a_frontend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_RDMA_TOKEN", "secret")
    monkeypatch.setenv("BLINK_VERBS_LIBRARY", "/nothing/libblink_verbs.so")
    code = (
        "from blink.link.rdma.connector import RdmaConnector; from blink.rdma_config import RdmaConfig\n"
        "try: RdmaConnector('127.0.0.1:1', RdmaConfig())\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("ConfigError") and "libibverbs-dev" in result.stdout


def test_ends_of_different_backends_refuse_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = in_thread(lambda: admit(Lines(ends[0]), "secret", "verbs", lambda _: DESCRIPTOR))
    with pytest.raises(BackendMismatchError, match="--rdma-backend verbs, not nixl"):
        negotiate(Lines(ends[1]), "secret", "nixl", {})
    thread.join()
    assert isinstance(errors[0], BackendMismatchError)


def test_the_metadata_of_an_agent_is_read_and_what_is_none_is_an_error() -> None:
    assert parse_metadata({"metadata": base64.b64encode(bytes(range(256))).decode()}) == bytes(range(256))
    for end in ({"metadata": "?"}, {"metadata": 5}, {}):
        with pytest.raises(HandshakeError):
            parse_metadata(end)


def test_without_nixl_a_frontend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_RDMA_TOKEN", "secret")
    code = (
        "import sys; sys.modules['nixl'] = None\n"
        "from blink.link.rdma.connector import RdmaConnector; from blink.rdma_config import RdmaConfig\n"
        "try: RdmaConnector('127.0.0.1:1', RdmaConfig(rdma_backend='nixl'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("ConfigError") and "pip install '.[nixl]'" in result.stdout


@pytest.mark.parametrize("transports", ["", "all", "rc,all", "^tcp", "rc,", "RC"])
def test_a_list_that_would_allow_anything_is_refused(transports: str) -> None:
    with pytest.raises(ConfigError, match="--nixl-transports"):
        NixlLink(transports)
