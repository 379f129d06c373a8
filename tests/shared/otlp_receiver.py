# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry's traces, over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """An OTLP collector: takes spans at /v1/traces, while its door is open."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.heads: list[dict[str, str]] = []  # of each request
        self.refusals: deque[int] = deque()  # statuses of the next answers
        self.door = threading.Event()  # who comes waits for it
        self.door.set()
        self.resources: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                receiver.heads.append({name.lower(): value for name, value in self.headers.items()})
                receiver.door.wait()
                status = receiver.refusals.popleft() if receiver.refusals else 200
                if status == 200:
                    data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                    receiver.take(ExportTraceServiceRequest.FromString(data))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.resources.append(values_of(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.door.set()
        self._server.shutdown()
        self._server.server_close()


def values_of(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
