# SPDX-License-Identifier: Apache-2.0
"""Streamed completions that run at once, each in a thread: what every one of them got, and how it ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import httpx

from processes import wait_for


class Stream:
    """One streamed completion of a prompt of token ids."""

    def __init__(self, http: httpx.Client, prompt: Sequence[int], num_tokens: int) -> None:
        self.prompt = prompt
        self.text = ""
        self.num_chunks = 0
        self.error = ""
        self._http = http
        self._body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._http.stream("POST", "/v1/completions", json=self._body) as response:
                if response.is_error:
                    self.error = response.read().decode()
                    return
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _take(self, event: dict[str, list[dict[str, str]]]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        else:
            self.text += event["choices"][0]["text"]
            self.num_chunks += 1


def open_streams(
    http: httpx.Client, prompts: Sequence[Sequence[int]], num_tokens: int, patience: float
) -> list[Stream]:
    """Start a stream for each prompt; return when all have begun or failed."""
    streams = [Stream(http, prompt, num_tokens) for prompt in prompts]
    wait_for(lambda: all(stream.num_chunks > 0 or stream.error for stream in streams), patience)
    return streams


def finish(streams: Sequence[Stream]) -> None:
    """Wait for the end of all streams."""
    for stream in streams:
        stream.finish()
