# SPDX-License-Identifier: Apache-2.0
"""The options of `blink top` and `blink trace`: frozen dataclasses whose fields become flags."""

from __future__ import annotations

from dataclasses import dataclass

from blink.config import option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The server to look at, and how."""

    url: str = option("", "its URL, such as http://10.0.0.2:8000; empty: an engine of this machine, without HTTP")
    region: str = option("", "region of the engine, if several run on this machine")
    api_key: str = option("", "key of the server; also BLINK_API_KEY, VLLM_API_KEY")
    interval: float = option(1.0, "seconds between two looks")
    once: bool = option(False, "print the figures of one interval and leave")
    json: bool = option(False, "print the figures as a line of JSON each time")

    def __post_init__(self) -> None:
        require(self, "interval", 0.1, 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The engine of this machine to look at, and what to keep."""

    region: str = option("", "region of the engine, if several run on this machine")
    duration: float = option(0.0, "seconds to follow the engine; 0: the steps that it still knows, at most 4,096")
    output: str = option("blink-trace.json", "file to write, for ui.perfetto.dev or chrome://tracing", metavar="FILE")

    def __post_init__(self) -> None:
        require(self, "duration", 0, 3600)
