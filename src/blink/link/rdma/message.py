# SPDX-License-Identifier: Apache-2.0
"""Messages of the control port: JSON, one per line, over TCP; and the plain structs that they carry."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import TypeVar

from blink.errors import BlinkError

TIMEOUT = 5.0  # seconds for all messages of one connection
_MAX_LINE = 4096

Message = Mapping[str, object]
Field = TypeVar("Field")
Struct = TypeVar("Struct", bound=ctypes.Structure)


class HandshakeError(BlinkError):
    """The other end does not speak this protocol, or is too slow."""


class RemoteMemory(ctypes.Structure):
    """Memory of the engine that the other end may reach; RemoteMemory of csrc/rdma/verbs_link.h."""

    _fields_ = (
        ("start", ctypes.c_uint64),  # bytes from the region's start
        ("bytes", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def connect(place: tuple[str, int]) -> socket.socket:
    """Return a TCP connection to HOST, PORT.

    Raises:
        OSError: nobody listens there, or the host does not answer.
    """
    connection = socket.create_connection(place, TIMEOUT)
    # A client whose own port happens to be the one it calls gets through to itself (RFC 9293, 3.5), and whoever is
    # about to listen there would find the port taken.
    if connection.getsockname() == connection.getpeername():
        # Reset, or its end would keep the port for another minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


class Lines:
    """Messages over a TCP connection, of limited length and with one deadline for all."""

    def __init__(self, connection: socket.socket, max_line: int = _MAX_LINE) -> None:
        self._connection = connection
        self._max_line = max_line
        self._deadline = time.monotonic() + TIMEOUT
        self._received = b""

    def send(self, message: Message) -> None:
        """Send one message."""
        self._wait()
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
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
        poll = select.poll()  # select() knows descriptors up to 1,023 only
        poll.register(self._connection, select.POLLIN)
        has_come = bool(self._received) or bool(poll.poll(0))
        return has_come or time.monotonic() > self._deadline

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


def read_field(message: Message, name: str, kind: type[Field]) -> Field:
    """Return a field of a message.

    Raises:
        HandshakeError: it is missing or of another type.
    """
    value = message.get(name)
    if not isinstance(value, kind) or type(value) is not kind:  # True is no number
        raise HandshakeError(f"the field {name!r} is missing or wrong")
    return value


def struct_to_message(value: ctypes.Structure) -> Message:
    """Return a struct as a plain message: numbers, and bytes as hexadecimal digits."""
    fields = ((name, getattr(value, name)) for name, *_ in value._fields_)
    return {name: item if isinstance(item, int) else bytes(item).hex() for name, item in fields}


def struct_from_message(kind: type[Struct], message: Message) -> Struct:
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
