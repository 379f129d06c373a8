# SPDX-License-Identifier: Apache-2.0
"""A server of completions that knows one thing: events at fixed gaps. What a client sees otherwise is its own error.

Runs as `python -m flat.fake_server GAP_MS NUM_EVENTS PARENT` and prints its port.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from blink.host.process import die_with_parent

_EVENT: Final = b'data: {"choices":[{"text":"a"}]}\n\n'
_MODELS: Final = b'{"data":[{"id":"fake","max_model_len":2048}]}'


class FakeServer(ThreadingHTTPServer):
    """Listens on a free port of the loopback device."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, gap: float, num_events: int) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.gap, self.num_events = gap, num_events  # seconds


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_MODELS)))
        self.end_headers()
        self.wfile.write(_MODELS)

    def do_POST(self) -> None:
        assert isinstance(self.server, FakeServer)
        due = time.monotonic()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(self.server.num_events):
            time.sleep(max(0.0, due - time.monotonic()))
            self._write(_EVENT)
            due += self.server.gap  # of the plan, not of the last event: no lateness adds up
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": self.server.num_events}}
        self._write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        """Keep silent."""


def main() -> None:
    """Serve until the parent ends."""
    gap, num_events, parent = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    server = FakeServer(float(gap) / 1e3, int(num_events))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
