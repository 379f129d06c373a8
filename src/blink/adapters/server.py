# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the socket by which frontends load and unload adapters: on threads of the host process."""

from __future__ import annotations

import json
import logging
import os
import socketserver
import threading
from typing import Any

from blink.adapters.memory import AdapterMemory
from blink.adapters.protocol import MAX_LINE, Held, describe_error, socket_path
from blink.errors import BadRequestError, BlinkError, ConfigError

logger = logging.getLogger("blink.engine")

_READ_SECONDS = 5.0


class AdapterServer:
    """Answers the frontends of this user until close()."""

    def __init__(self, region: str, memory: AdapterMemory) -> None:
        """Listen; start() answers.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self._path = socket_path(region)
        self._path.unlink(missing_ok=True)  # of an engine that was killed
        before = os.umask(0o177)
        try:
            self._server = _Server(str(self._path), memory)
        except OSError as error:
            raise ConfigError(f"{self._path}: no socket can be made ({error.strerror})") from error
        finally:
            os.umask(before)
        self._thread = threading.Thread(target=self._server.serve_forever, name="blink-adapters", daemon=True)

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

    def __init__(self, path: str, memory: AdapterMemory) -> None:
        self.memory = memory
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _READ_SECONDS
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        """Answer one question."""
        try:
            answer = _answer(self.server.memory, self.rfile.readline(MAX_LINE))
        except BlinkError as error:
            answer = describe_error(error)
        except Exception as error:
            logger.exception("an adapter could not be loaded")
            answer = describe_error(BadRequestError(f"The adapter cannot be loaded: {type(error).__name__}."))
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _answer(memory: AdapterMemory, line: bytes) -> dict[str, Any]:
    question = json.loads(line)
    if "unload" in question:
        memory.unload(Held(**question["unload"]))
        return {}
    replaced = question["replaced"]
    held = memory.load(question["load"], None if replaced is None else Held(**replaced))
    logger.info("adapter %s: index %d, content %s", question["load"], held.index, held.content)
    return {"held": {"index": held.index, "generation": held.generation, "content": held.content}}
