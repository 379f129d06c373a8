# SPDX-License-Identifier: Apache-2.0
"""How many HTTP requests there were, how they ended and how long they took, by vLLM's names; once a request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blink.api.observe.exposition import Family, Labels

_RESPONSE = "/v1/responses/{response_id}"
_HANDLERS = {
    "POST": (
        "/v1/completions", "/completions", "/v1/chat/completions", "/chat/completions", "/invocations",
        "/v1/responses", "/responses", "/v1/responses/input_tokens", f"{_RESPONSE}/cancel", "/v1/messages",
        "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show", "/completion", "/infill",
        "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render", "/v1/embeddings",
        "/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
        "/apply-template", "/tokenize", "/detokenize", "/reset_prefix_cache", "/pause",
        "/resume", "/pause_generation", "/continue_generation", "/sleep", "/wake_up",
        "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
        "/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update",
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "none",
    ),
    "GET": (
        "/v1/models", "/models", "/v1/models/{model_id}", _RESPONSE, f"{_RESPONSE}/input_items", "/tokenizer_info",
        "/api/tags", "/api/version", "/api/ps", "/props", "/is_paused", "/is_sleeping",
        "/get_world_size", "/", "none",
    ),
    "DELETE": (_RESPONSE,),
    "other": ("none",),
}  # fmt: skip
_ROUTES = tuple((method, handler) for method, handlers in _HANDLERS.items() for handler in handlers)
_ROWS = {route: row for row, route in enumerate(_ROUTES)}
# As vLLM: what probes and scrapes ask is not counted.
_EXCLUDED = ("/metrics", "/health", "/v1/health", "/load", "/ping", "/version", "/server_info")
_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_BUCKETS = (0.1, 0.5, 1.0)  # seconds, as vLLM's
_BOUNDS = (*map(repr, _BUCKETS), "+Inf")
_DURATIONS = len(_STATUSES)  # where a row's histogram begins: its counts, then its sum
_WIDTH = _DURATIONS + len(_BOUNDS) + 1
NUM_HTTP_VALUES = len(_ROUTES) * _WIDTH

Count = Callable[[str, str, int, float], None]


class RequestCounter:
    """Tell of each request its method, path and status, and how many seconds it took; nothing per chunk."""

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            self._count(scope["method"], scope["path"], status, time.perf_counter() - begun)


def count_request(values: memoryview[float], method: str, path: str, status: int, seconds: float) -> None:
    """Count a request in the values of this module."""
    if path in _EXCLUDED:
        return
    begin = _row_of(method, path) * _WIDTH
    values[begin + min(max(status // 100 - 2, 0), len(_STATUSES) - 1)] += 1
    values[begin + _DURATIONS + bisect_left(_BUCKETS, seconds)] += 1
    values[begin + _WIDTH - 1] += seconds


def rows_with_requests(values: Sequence[float]) -> tuple[int, ...]:
    """Return the rows that have counted something: others are not shown."""
    return tuple(row for row in range(len(_ROUTES)) if any(values[row * _WIDTH : row * _WIDTH + _DURATIONS]))


def http_families(rows: tuple[int, ...], offset: int) -> Iterator[Family[Sequence[float]]]:
    """Yield the metrics of these rows, whose values begin at `offset`."""
    if not rows:
        return
    begins = [offset + row * _WIDTH for row in rows]
    labels: list[Labels] = [(("method", _ROUTES[row][0]), ("handler", _ROUTES[row][1])) for row in rows]
    counts = tuple(("_total", (*each, ("status", status))) for each in labels for status in _STATUSES)
    yield Family(
        "http_requests",
        "HTTP requests by method, status and handler.",
        "counter",
        counts,
        lambda values: [count for begin in begins for count in values[begin : begin + _DURATIONS]],
    )
    samples = tuple(
        sample
        for each in labels
        for sample in (*(("_bucket", (*each, ("le", bound))) for bound in _BOUNDS), ("_count", each), ("_sum", each))
    )
    text = "Seconds from a request's head to the end of its response."
    yield Family("http_request_duration_seconds", text, "histogram", samples, lambda values: _durations(values, begins))


def _durations(values: Sequence[float], begins: Sequence[int]) -> list[float]:
    found: list[float] = []
    for begin in begins:
        counts = [*accumulate(values[begin + _DURATIONS : begin + _WIDTH - 1])]
        found += [*counts, counts[-1], values[begin + _WIDTH - 1]]
    return found


def _row_of(method: str, path: str) -> int:
    row = _ROWS.get((method, path))
    if row is None:
        known = method if method in _HANDLERS else "other"
        row = _ROWS.get((known, _template_of(path)), _ROWS.get((known, "none"), _ROWS["other", "none"]))
    return row


def _template_of(path: str) -> str:
    """Return the handler of a path that holds a name or an id."""
    for prefix in ("/v1/models/", "/models/"):
        if path.startswith(prefix):
            return "/v1/models/{model_id}"
    head, _, rest = path.removeprefix("/v1/responses/").partition("/")
    is_stored = path.startswith("/v1/responses/") and bool(head)
    return f"{_RESPONSE}/{rest}".rstrip("/") if is_stored else path
