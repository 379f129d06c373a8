# SPDX-License-Identifier: Apache-2.0
"""Questions to an engine's host process, off the token path: a line of JSON each way, over a Unix socket.

Bytes may follow a question's line, up to the end of what the asker sends. The socket is for the engine's user alone.
Each kind of question has a socket of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import socketserver
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from blink.errors import BadRequestError, BlinkError, ConfigError, EngineUnavailableError, OverloadedError
from blink.region.files import region_path

logger = logging.getLogger("blink.engine")

_MAX_LINE = 4 << 20  # it may name all tensors of a model
_READ_SECONDS = 5.0
_BYTES_SECONDS = 300.0  # within which more of the bytes that follow a question has to come
_PIECE = 1 << 20
_ERRORS: dict[str, type[BlinkError]] = {
    error.__name__: error for error in (BadRequestError, OverloadedError, EngineUnavailableError)
}

Answer = Callable[[dict[str, Any], BufferedIOBase], Mapping[str, Any]]  # of a question, and the bytes that follow it


def socket_path(region: str, kind: str) -> Path:
    """Return where an engine listens for a kind of question; '~' is in no region's name."""
    path = region_path(region)
    return path.with_name(f"{path.name}~{kind}")


def ask_engine(
    region: str, kind: str, question: Mapping[str, Any], seconds: float, parts: Iterable[bytes] = ()
) -> dict[str, Any]:
    """Return the answer to a question, which `parts` follow; blocks until it is there.

    Raises:
        BadRequestError: the engine refuses.
        OverloadedError: it cannot now.
        EngineUnavailableError: no engine answers within `seconds`.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(str(socket_path(region, kind)))
            connection.sendall(_line_of(question))
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                line = stream.readline(_MAX_LINE)
    except OSError as error:
        raise _unanswered(kind) from error
    return _read_answer(kind, line)


async def stream_to_engine(
    region: str, kind: str, question: Mapping[str, Any], seconds: float, parts: AsyncIterable[bytes]
) -> dict[str, Any]:
    """Do what ask_engine() does on an event loop: no part is asked for before the engine has room for it.

    An answer that comes before the last part ends the stream.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path(region, kind)), limit=_MAX_LINE)
    except OSError as error:
        raise _unanswered(kind) from error
    answer = asyncio.ensure_future(reader.readline())
    try:
        writer.write(_line_of(question))
        async for part in parts:
            writer.write(part)
            await writer.drain()
            if answer.done():
                break
        else:
            writer.write_eof()
        line = await asyncio.wait_for(answer, seconds)
    except (OSError, ValueError, TimeoutError) as error:
        raise _unanswered(kind) from error
    finally:
        answer.cancel()
        writer.close()
    return _read_answer(kind, line)


def _line_of(question: Mapping[str, Any]) -> bytes:
    line = json.dumps(question).encode() + b"\n"
    if len(line) > _MAX_LINE:
        raise BadRequestError(f"This asks for too much at once: {len(line)} bytes of at most {_MAX_LINE}.")
    return line


def _read_answer(kind: str, line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise _unanswered(kind) from error
    if "error" in answer:
        raise _ERRORS.get(answer["type"], EngineUnavailableError)(answer["error"], answer["param"])
    return answer


def _unanswered(kind: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"Not available: the engine does not answer about its {kind}.")


class EngineSocket:
    """Answers the questions of one kind until close(), each on a thread of its own."""

    def __init__(self, region: str, kind: str, answer: Answer) -> None:
        """Listen; start() answers.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self._path = socket_path(region, kind)
        self._path.unlink(missing_ok=True)  # of an engine that was killed
        before = os.umask(0o177)
        try:
            self._server = _Server(str(self._path), kind, answer)
        except OSError as error:
            raise ConfigError(f"{self._path}: no socket can be made ({error.strerror})") from error
        finally:
            os.umask(before)
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"blink-{kind}", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, kind: str, answer: Answer) -> None:
        self.kind, self.answer = kind, answer
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _READ_SECONDS
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        """Answer one question; what it leaves of the bytes that follow is read, so that the answer is not lost."""
        try:
            question = json.loads(self.rfile.readline(_MAX_LINE))
            self.connection.settimeout(_BYTES_SECONDS)
            answer = self.server.answer(question, self.rfile)
        except BlinkError as error:
            answer = _describe(error)
        except Exception as error:
            logger.exception("a question about the engine's %s could not be answered", self.server.kind)
            answer = _describe(BadRequestError(f"The engine's {self.server.kind}: {type(error).__name__}."))
        with suppress(OSError):
            self.wfile.write(json.dumps(answer).encode() + b"\n")
            while self.rfile.read(_PIECE):
                pass


def _describe(error: BlinkError) -> dict[str, Any]:
    """Return the answer that ask_engine() raises as the same error; a ConfigError as a BadRequestError."""
    kind = BadRequestError if isinstance(error, ConfigError) else type(error)
    return {"error": error.message, "param": error.param, "type": kind.__name__}
