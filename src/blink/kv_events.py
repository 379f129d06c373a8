# SPDX-License-Identifier: Apache-2.0
"""Events of the KV cache as `--kv-events-config` describes them: vLLM's JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from blink.errors import ConfigError

_FLAG = "--kv-events-config"
_PUBLISHERS = ("null", "zmq")
_RING_EVENTS = 1 << 14  # that the scheduler may be ahead of the publisher
_NO_EFFECT = "max_queue_size"  # the ring of the scheduler is the queue


@dataclass(frozen=True, slots=True)
class KvEvents:
    """How events are published; `enable_kv_cache_events` says whether they are."""

    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000  # batches that the replay socket remembers
    hwm: int = 100_000  # messages that wait for a slow subscriber before it misses some
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether the scheduler notes events."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def sizes(self) -> dict[str, int]:
        """The fields of a geometry."""
        return {"num_kv_events": _RING_EVENTS if self.is_on else 0}


def read_kv_events(values: Mapping[str, Any]) -> KvEvents:
    """Return what the object of --kv-events-config asks for; an empty one is nothing.

    Raises:
        ConfigError: it names what Blink does not have, or values of another type.
    """
    given = {key: value for key, value in values.items() if value is not None and key != _NO_EFFECT}
    usual = {each.name: each.default for each in fields(KvEvents)}
    for key, value in given.items():
        if key not in usual:
            raise ConfigError(f"{_FLAG} has no {key!r}: it takes {', '.join((*usual, _NO_EFFECT))}")
        if type(value) is not type(usual[key]):
            raise ConfigError(f"{_FLAG}: {key} must be a {type(usual[key]).__name__}, got {value!r}")
        if type(value) is int and value < 1:
            raise ConfigError(f"{_FLAG}: {key} must be at least 1, got {value}")
    read = KvEvents(**given)
    if read.publisher not in ("", *_PUBLISHERS):
        raise ConfigError(f"{_FLAG}: publisher must be one of {', '.join(_PUBLISHERS)}, got {read.publisher!r}")
    return read
