# SPDX-License-Identifier: Apache-2.0
"""The words that engine and frontend exchange over TCP to set an RDMA connection up: JSON, one message per line.

engine    {"blink": 1, "digest": ..., "nonce": ...}
frontend  {"digest": ..., "proof": HMAC-SHA256(token, nonce), "backend": NAME, "endpoint": {...}}
engine    {"endpoint": {...}, "epoch": ..., "pair_index": ..., "shared": {...}, "pair": {...}}
          or {"refused": KIND, "message": ...}
frontend  {"connected": true}, with the backend nixl only: its engine takes part until then
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink.config import RdmaConfig
from blink.errors import BlinkError, ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.link.rdma.nixl_agent import AgentInfo
from blink.link.rdma.verbs import EndpointInfo, RemoteWindow
from blink.region.layout import DIGEST

VERSION = 1
TIMEOUT = 5.0  # seconds for the whole exchange
_MAX_LINE = 4096
_TOKEN_VARIABLE = "BLINK_RDMA_TOKEN"
_OTHER_BUILD = "the engine runs another build of Blink: use the same one on both machines"


class HandshakeError(BlinkError):
    """The other end does not speak this protocol, or is too slow."""


class RefusedError(BlinkError):
    """The engine refuses this frontend: its token is not the engine's."""


class BackendMismatchError(BlinkError):
    """Engine and frontend were started with different --rdma-backend."""


EndInfo = EndpointInfo | AgentInfo  # what one end tells the other of itself, for verbs and for NIXL

# What a refusal is called on the wire.
REFUSALS: Mapping[str, type[BlinkError]] = {
    "token": RefusedError,
    "build": LayoutMismatchError,
    "backend": BackendMismatchError,
    "unavailable": EngineUnavailableError,
}


class LineChannel:
    """Messages over a TCP connection, of limited length and with one deadline for all."""

    def __init__(self, connection: socket.socket, max_line: int = _MAX_LINE) -> None:
        self._connection = connection
        self._max_line = max_line
        self._deadline = time.monotonic() + TIMEOUT
        self._received = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self._wait()
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            HandshakeError: it is too long, no JSON object, or the other end has gone.
        """
        while b"\n" not in self._received:
            self._wait()
            more = self._connection.recv(self._max_line)
            self._received += more
            if not more or len(self._received) > self._max_line:
                raise HandshakeError("the connection was closed" if not more else "a message is too long")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise HandshakeError("a message is no JSON object")
        return message

    def is_readable(self) -> bool:
        """Say whether receive() has something to look at: a message, an end, or the deadline."""
        has_come = bool(self._received) or bool(select.select([self._connection], [], [], 0)[0])
        return has_come or time.monotonic() > self._deadline

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


def read_field(message: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of a message.

    Raises:
        HandshakeError: it is missing or of another type.
    """
    value = message.get(name)
    if type(value) is not kind:
        raise HandshakeError(f"the field {name!r} is missing or wrong")
    return value


def struct_to_message(value: EndpointInfo | RemoteWindow) -> dict[str, Any]:
    """Return a struct as a plain message: numbers, and bytes as hexadecimal digits."""
    fields = ((name, getattr(value, name)) for name, *_ in value._fields_)
    return {name: item if isinstance(item, int) else bytes(item).hex() for name, item in fields}


def struct_from_message(kind: type[Any], message: Mapping[str, Any]) -> Any:
    """Return the struct in a message.

    Raises:
        HandshakeError: a field is missing, of another type or out of range.
    """
    value = kind()
    for name, field, *_ in kind._fields_:
        if issubclass(field, ctypes.Array):
            try:
                setattr(value, name, field.from_buffer_copy(bytes.fromhex(read_field(message, name, str))))
            except ValueError as error:
                raise HandshakeError(f"the field {name!r} is wrong") from error
        else:
            number = read_field(message, name, int)
            if not 0 <= number < 1 << 8 * ctypes.sizeof(field):
                raise HandshakeError(f"the field {name!r} is out of range")
            setattr(value, name, number)
    return value


def backend_of(info: EndInfo) -> str:
    """Return the name of the backend that an end belongs to."""
    return "nixl" if isinstance(info, AgentInfo) else "verbs"


def end_to_message(info: EndInfo) -> dict[str, Any]:
    """Return an end as a plain message."""
    if isinstance(info, AgentInfo):
        return {"metadata": base64.b64encode(info.metadata).decode()}
    return struct_to_message(info)


def end_from_message(backend: str, message: Mapping[str, Any]) -> Any:
    """Return the end in a message.

    Raises:
        HandshakeError: a field is missing, of another type or out of range.
    """
    if backend != "nixl":
        return struct_from_message(EndpointInfo, message)
    try:
        return AgentInfo(base64.b64decode(read_field(message, "metadata", str), validate=True))
    except (binascii.Error, ValueError) as error:
        raise HandshakeError("the field 'metadata' is wrong") from error


def prove(token: str, nonce: str) -> str:
    """Return the proof that one knows the token; the token itself never travels."""
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def is_proved(token: str, nonce: str, proof: str) -> bool:
    """Check a proof in constant time."""
    return hmac.compare_digest(prove(token, nonce).encode(), proof.encode())


def parse_place(text: str, flag: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag} must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def read_token(config: RdmaConfig) -> str:
    """Return the secret that engine and frontends share.

    Raises:
        ConfigError: there is none, or its file cannot be read.
    """
    token = os.environ.get(_TOKEN_VARIABLE, "")
    if config.rdma_token_file:
        try:
            token = Path(config.rdma_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --rdma-token-file {config.rdma_token_file}: {error}") from error
    if not token:
        raise ConfigError(
            f"RDMA needs a secret that engine and frontends share: --rdma-token-file or {_TOKEN_VARIABLE}"
        )
    return token


@dataclass(frozen=True, slots=True)
class Descriptor:
    """All that a frontend must know to use a queue pair on another machine."""

    endpoint: EndInfo
    shared: RemoteWindow  # the region's header and control block: to be read
    pair: RemoteWindow  # the queue pair: to be read and written
    pair_index: int
    epoch: int


def negotiate(control: LineChannel, token: str, own: EndInfo) -> Descriptor:
    """Ask the engine for a queue pair: the frontend's part of the exchange.

    Raises:
        LayoutMismatchError: engine and frontend are of different builds.
        RefusedError: the engine has another token.
        BackendMismatchError: the engine was started with another --rdma-backend.
        EngineUnavailableError: it has no queue pair left.
        HandshakeError: it says something else.
    """
    greeting = control.receive()
    if read_field(greeting, "blink", int) != VERSION or read_field(greeting, "digest", str) != f"{DIGEST:x}":
        raise LayoutMismatchError(_OTHER_BUILD)
    proof = prove(token, read_field(greeting, "nonce", str))
    backend = backend_of(own)
    request = {"digest": f"{DIGEST:x}", "proof": proof, "backend": backend, "endpoint": end_to_message(own)}
    control.send(request)
    answer = control.receive()
    if "refused" in answer:
        raise REFUSALS.get(answer["refused"], HandshakeError)(str(answer.get("message")))
    return Descriptor(
        end_from_message(backend, read_field(answer, "endpoint", dict)),
        struct_from_message(RemoteWindow, read_field(answer, "shared", dict)),
        struct_from_message(RemoteWindow, read_field(answer, "pair", dict)),
        read_field(answer, "pair_index", int),
        read_field(answer, "epoch", int),
    )


def admit(control: LineChannel, token: str, prepare: Callable[[Any], Descriptor], backend: str = "verbs") -> None:
    """Let a frontend in that knows the token: the engine's part of the exchange.

    Raises:
        BlinkError: it was refused; it has been told why.
    """
    nonce = secrets.token_hex(16)
    control.send({"blink": VERSION, "digest": f"{DIGEST:x}", "nonce": nonce})
    try:
        request = control.receive()
        if not is_proved(token, nonce, read_field(request, "proof", str)):
            raise RefusedError("the engine refuses this frontend's RDMA token")
        if read_field(request, "digest", str) != f"{DIGEST:x}":
            raise LayoutMismatchError(_OTHER_BUILD)
        theirs = read_field(request, "backend", str)
        if theirs != backend:
            raise BackendMismatchError(f"the engine was started with --rdma-backend {backend}, not {theirs:.20}")
        descriptor = prepare(end_from_message(backend, read_field(request, "endpoint", dict)))
    except BlinkError as error:
        kind = next((name for name, refusal in REFUSALS.items() if type(error) is refusal), "other")
        control.send({"refused": kind, "message": error.message})
        raise
    control.send(
        {
            "endpoint": end_to_message(descriptor.endpoint),
            "epoch": descriptor.epoch,
            "pair_index": descriptor.pair_index,
            "shared": struct_to_message(descriptor.shared),
            "pair": struct_to_message(descriptor.pair),
        }
    )
