# SPDX-License-Identifier: Apache-2.0
"""A conversation with a server in the terminal: Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from blink.config import key_of_environment
from blink.errors import BlinkError, ConfigError, EngineUnavailableError

Message = dict[str, str]

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: some text, or at the end the number of tokens."""

    text: str = ""
    num_tokens: int = 0


class Server:
    """The HTTP client of one server."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--url {url}: give a full address such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._model = model
        limits = {"max_tokens": max_tokens, "temperature": temperature}
        self._limits = {name: value for name, value in limits.items() if value is not None}
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10.0, read=None),  # a long prompt may take its time
            trust_env=urlsplit(self._url).hostname not in _LOOPBACK,  # a proxy cannot reach this host's loopback
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """Name of the model that answers.

        Raises:
            EngineUnavailableError: no server answers.
            BlinkError: the server refuses.
        """
        if self._model is None:
            try:
                response = self._http.get("/v1/models")
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            _raise_for_status(response)
            self._model = str(response.json()["data"][0]["id"])
        return self._model

    def stream_answer(self, messages: list[Message]) -> Generator[Piece]:
        """Yield the answer to a conversation piece by piece; closing the iterator cancels the request.

        Raises:
            EngineUnavailableError: no server answers, or the connection broke.
            BlinkError: the server refuses the request or fails in the middle.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._limits,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _raise_for_status(response)
                yield from read_pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> EngineUnavailableError:
        if isinstance(error, httpx.ConnectError):
            return EngineUnavailableError(f"no server at {self._url}: start one with `blink serve`, or give --url")
        return EngineUnavailableError(f"lost the connection to {self._url}: {error}")


def run(namespace: Namespace) -> int:
    """Talk to a server as the flags say; return the exit status."""
    with Server(
        namespace.url,
        model=namespace.model,
        api_key=namespace.api_key or key_of_environment(),
        max_tokens=namespace.max_tokens,
        temperature=namespace.temperature,
    ) as server:
        return run_chat(server, namespace.system, namespace.once)


def run_chat(server: Server, system: str | None, once: str | None) -> int:
    """Answer `once`, or talk until Ctrl-D; return the exit status."""
    messages = [{"role": "system", "content": system}] if system else []
    if once is not None:
        print_answer(server, [*messages, {"role": "user", "content": once}])
        return 0
    import_module("readline")  # gives input() line editing and a history
    print(f"Talking to {server.model}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = print_answer(server, messages)
        except BlinkError as error:
            print(f"blink: error: {error.message}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def print_answer(server: Server, messages: list[Message]) -> str:
    """Stream one answer to the terminal and return it; Ctrl-C ends it early and keeps what came."""
    parts: list[str] = []
    num_tokens, asked_at, first_at = 0, time.monotonic(), 0.0
    pieces = server.stream_answer(messages)
    try:
        for piece in pieces:
            first_at = first_at or time.monotonic()
            num_tokens = num_tokens or piece.num_tokens
            parts.append(piece.text)
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
        print(" [stopped]", end="")
    print(flush=True)
    if num_tokens > 1 and sys.stderr.isatty():
        rate = (num_tokens - 1) / (time.monotonic() - first_at)
        text = f"[{num_tokens} tokens, first after {first_at - asked_at:.2f} s, then {rate:.1f} tokens/s]"
        print(text, file=sys.stderr)
    return "".join(parts)


def _ask() -> str | None:
    """Read a line; None at the end of input. Ctrl-C drops what was typed."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def read_pieces(lines: Iterator[str]) -> Iterator[Piece]:
    """Parse the lines of an event stream."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise BlinkError(_error_text(chunk))
        usage = chunk.get("usage") or {}
        for choice in chunk["choices"]:
            yield Piece(choice["delta"].get("content") or "")
        if usage:
            yield Piece(num_tokens=usage["completion_tokens"])
    raise EngineUnavailableError("the server ended the answer early")


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        text = _error_text(response.json())
    except ValueError:
        text = response.text[:200]
    raise BlinkError(f"the server answers {response.status_code}: {text}")


def _error_text(body: dict[str, Any]) -> str:
    """Take the message from an error body, in its long or short form."""
    error = body.get("error", body)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
