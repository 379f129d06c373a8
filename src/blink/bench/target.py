# SPDX-License-Identifier: Apache-2.0
"""What the load generator asks a server beforehand: its model, the model's limit, its tokenizer."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from blink.bench.config import ServerConfig
from blink.bench.events import error_message
from blink.bench.record import Endpoint
from blink.config import key_of_environment
from blink.errors import BlinkError, ConfigError, EngineUnavailableError

_TIMEOUT = 30.0  # seconds
_CHAT_ENDPOINT = "/v1/chat/completions"


class Target:
    """A server that answers, and one of its models.

    Raises:
        ConfigError: the address is none.
        EngineUnavailableError: nobody answers there.
        BlinkError: the server refuses.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.endpoint = _parse_endpoint(config)
        key = config.api_key or key_of_environment()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=config.url,
            headers=self._headers,
            timeout=_TIMEOUT,
            trust_env=False,  # the load goes through no proxy either
            verify=self.endpoint.ssl_context() or True,
        )
        self.model, self.max_model_len = self._find_model(config.model)
        self._can_tokenize = True

    def request_head(self, body_bytes: int, *, is_chat: bool = False) -> bytes:
        """Return the request line and headers of a completion, or of a chat."""
        authority = urlsplit(self._config.url).netloc
        lines = [
            f"POST {_CHAT_ENDPOINT if is_chat else self._config.endpoint} HTTP/1.1",
            f"Host: {authority}",
            "Accept: text/event-stream",
        ]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {body_bytes}"]
        return "\r\n".join([*lines, "", ""]).encode()

    def resolved(self) -> Endpoint:
        """Return the endpoint with its name looked up, so that no request waits for a name server.

        Raises:
            ConfigError: there is no such host.
        """
        if self.endpoint.tls:  # the certificate is the name's
            return self.endpoint
        try:
            found = socket.getaddrinfo(self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"{self.endpoint.host}: {error.strerror}") from error
        return Endpoint(
            host=str(found[0][4][0]), port=self.endpoint.port, tls=False, timeout=self._config.request_timeout
        )

    def tokenize(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None if this server does not tokenize for others."""
        if not self._can_tokenize:
            return None
        try:
            return self._ask("POST", "/tokenize", {"model": self.model, "prompt": text}).json()["tokens"]
        except (httpx.HTTPError, BlinkError, KeyError, ValueError):
            self._can_tokenize = False
            return None

    def _find_model(self, wanted: str) -> tuple[str, int]:
        """Return the model's name and its longest prompt plus answer (0: the server does not say)."""
        url = self._config.url
        try:
            models: list[dict[str, Any]] = self._ask("GET", "/v1/models").json()["data"]
            lengths = {str(model["id"]): int(model.get("max_model_len") or 0) for model in models}
        except httpx.HTTPError as error:
            raise EngineUnavailableError(f"no server at {url}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BlinkError(f"{url}/v1/models lists no models: is this a server with OpenAI's API?") from error
        if not lengths and not wanted:
            raise BlinkError(f"{url} serves no model")
        name = wanted or next(iter(lengths))
        return name, lengths.get(name, 0)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        response = self._http.request(method, path, json=body)
        if response.is_error:
            try:
                text = error_message(response.json())
            except ValueError:
                text = response.text[:200]
            raise BlinkError(f"{self._config.url}{path} answers {response.status_code}: {text}")
        return response


def _parse_endpoint(config: ServerConfig) -> Endpoint:
    advice = f"--base-url {config.url}: give an address without a path, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(config.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:  # no port, or no IPv6 address
        raise ConfigError(advice) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
        raise ConfigError(advice)
    return Endpoint(host=parts.hostname, port=port, tls=parts.scheme == "https", timeout=config.request_timeout)
