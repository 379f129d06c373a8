# SPDX-License-Identifier: Apache-2.0
"""What engine and frontend say to each other over TCP to set an RDMA connection up.

Messages are JSON objects:

    engine    {"blink": 2, "digest": ..., "nonce": ...}
    frontend  {"digest": ..., "proof": HMAC-SHA256(token, nonce), "backend": NAME, "end": {...}}
    engine    {"end": {...}, "epoch": ..., "pair_index": ..., "shared": {...}, "pair": {...}}
              or {"refused": KIND, "message": ...}
    frontend  {"connected": true}, when it has read the engine's memory
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blink.errors import BlinkError, ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.link.rdma.message import (
    HandshakeError,
    Lines,
    Message,
    RemoteMemory,
    read_field,
    struct_from_message,
    struct_to_message,
)
from blink.rdma_config import RdmaConfig
from blink.region.layout import DIGEST

VERSION = 2
_TOKEN_VARIABLE = "BLINK_RDMA_TOKEN"
_OTHER_BUILD = "the engine runs another build of Blink: use the same one on both machines"


class RefusedError(BlinkError):
    """The engine refuses this frontend: its token is not the engine's."""


class BackendMismatchError(BlinkError):
    """Engine and frontend were started with different --rdma-backend."""


# What a refusal is called on the wire.
REFUSALS: Mapping[str, type[BlinkError]] = {
    "token": RefusedError,
    "build": LayoutMismatchError,
    "backend": BackendMismatchError,
    "unavailable": EngineUnavailableError,
}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """All that a frontend must know to use a queue pair on another machine."""

    end: Message  # the engine's end, as its backend describes it
    shared: RemoteMemory  # the region's header and control block: to be read
    pair: RemoteMemory  # the queue pair: to be read and written
    pair_index: int
    epoch: int

    def to_message(self) -> Message:
        """Return the descriptor as a plain message."""
        return {
            "end": self.end,
            "epoch": self.epoch,
            "pair_index": self.pair_index,
            "shared": struct_to_message(self.shared),
            "pair": struct_to_message(self.pair),
        }

    @classmethod
    def from_message(cls, message: Message) -> Descriptor:
        """Return the descriptor in a message.

        Raises:
            HandshakeError: a field is missing, of another type or out of range.
        """
        return cls(
            read_field(message, "end", dict),
            struct_from_message(RemoteMemory, read_field(message, "shared", dict)),
            struct_from_message(RemoteMemory, read_field(message, "pair", dict)),
            read_field(message, "pair_index", int),
            read_field(message, "epoch", int),
        )


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


def negotiate(lines: Lines, token: str, backend: str, own: Message) -> Descriptor:
    """Ask the engine for a queue pair: the frontend's part; `own` describes its end.

    Raises:
        LayoutMismatchError: engine and frontend are of different builds.
        RefusedError: the engine has another token.
        BackendMismatchError: the engine was started with another --rdma-backend.
        EngineUnavailableError: it has no queue pair left.
        HandshakeError: it says something else.
    """
    greeting = lines.receive()
    if read_field(greeting, "blink", int) != VERSION or read_field(greeting, "digest", str) != f"{DIGEST:x}":
        raise LayoutMismatchError(_OTHER_BUILD)
    proof = prove(token, read_field(greeting, "nonce", str))
    lines.send({"digest": f"{DIGEST:x}", "proof": proof, "backend": backend, "end": own})
    answer = lines.receive()
    if "refused" in answer:
        raise REFUSALS.get(str(answer["refused"]), HandshakeError)(str(answer.get("message")))
    return Descriptor.from_message(answer)


def confirm(lines: Lines) -> None:
    """Tell the engine that its memory was reached: the frontend's last word."""
    lines.send({"connected": True})


def admit(lines: Lines, token: str, backend: str, prepare: Callable[[Message], Descriptor]) -> None:
    """Let a frontend in that knows the token: the engine's part; `prepare` is given the frontend's end.

    Raises:
        BlinkError: it was refused; it has been told why.
    """
    nonce = secrets.token_hex(16)
    lines.send({"blink": VERSION, "digest": f"{DIGEST:x}", "nonce": nonce})
    try:
        request = lines.receive()
        if not is_proved(token, nonce, read_field(request, "proof", str)):
            raise RefusedError("the engine refuses this frontend's RDMA token")
        if read_field(request, "digest", str) != f"{DIGEST:x}":
            raise LayoutMismatchError(_OTHER_BUILD)
        theirs = read_field(request, "backend", str)
        if theirs != backend:
            raise BackendMismatchError(f"the engine was started with --rdma-backend {backend}, not {theirs:.20}")
        descriptor = prepare(read_field(request, "end", dict))
    except BlinkError as error:
        kind = next((name for name, refusal in REFUSALS.items() if type(error) is refusal), "other")
        lines.send({"refused": kind, "message": error.message})
        raise
    lines.send(descriptor.to_message())
