# SPDX-License-Identifier: Apache-2.0
"""The options of an engine in this process: Blink's own and vLLM's flags, as keyword arguments."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from blink.config import EngineConfig, FrontendConfig, ModelConfig
from blink.errors import ConfigError
from blink.hub.localize import localize
from blink.rdma_config import RdmaConfig
from blink.vllm.options import to_own_options

_OF_CHATS = ("chat_template", "default_chat_template_kwargs")
# vLLM's engine has these; here they are a server's, and there is none.
_OF_SERVERS = {"disable_log_stats", "enable_log_requests", "max_num_queued_reqs", "shutdown_timeout"}


class EngineArgs:
    """The options of an engine, to be changed before there is one.

    Args:
        model: as LLM's.
        options: as LLM's.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        self.model = model
        self.__dict__.update(options)

    @property
    def options(self) -> dict[str, Any]:
        """Return all options but the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}


class AsyncEngineArgs(EngineArgs):
    """The options of AsyncLLM."""


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The configuration of an engine in this process and of what stands before it."""

    engine: EngineConfig
    frontend: FrontendConfig


def read_options(model: str, options: dict[str, Any]) -> LocalConfig:
    """Return the configuration that options ask for, with models of the hub on this machine.

    Raises:
        ConfigError: an option is unknown, of another type, or asks for what is not done here.
    """
    groups = _groups_of_engine()
    names: dict[type, Sequence[str]] = {
        ModelConfig: [field.name for field in fields(ModelConfig)],
        EngineConfig: [field.name for field in fields(EngineConfig) if field.name not in ("model", *groups)],
        **{cls: [field.name for field in fields(cls)] for cls in groups.values()},
        FrontendConfig: _OF_CHATS,
    }
    types = {cls: get_type_hints(cls) for cls in names}
    known = {name for each in names.values() for name in each}
    options = to_own_options(options, known | _OF_SERVERS)
    if options.pop("data_parallel_size", 1) != 1:
        raise ConfigError("data_parallel_size is for `blink serve`: an engine in this process is one; it has one GPU")
    options = {name: value for name, value in options.items() if name not in _OF_SERVERS}
    if unknown := set(options) - known:
        raise ConfigError(f"unknown option {min(unknown)!r}; known: {', '.join(sorted(known))}")
    chosen: dict[type, dict[str, Any]] = {
        cls: {name: options[name] for name in own if name in options} for cls, own in names.items()
    }
    for cls, values in chosen.items():
        for name, value in values.items():
            _check_type(cls, name, value, types[cls][name])
    chosen[EngineConfig].setdefault("region", f"llm-{os.getpid()}-{secrets.token_hex(3)}")
    own = localize(ModelConfig(model=model, **chosen[ModelConfig]))
    frontend = FrontendConfig(model=own, **chosen[FrontendConfig])
    made = {name: cls(**chosen[cls]) for name, cls in groups.items()}
    return LocalConfig(EngineConfig(model=own, **made, **chosen[EngineConfig]), frontend)


def _groups_of_engine() -> dict[str, type[Any]]:
    """Return the fields of an engine's configuration that hold several options of a call."""
    kinds: dict[str, type[Any]] = get_type_hints(EngineConfig)
    return {name: kind for name, kind in kinds.items() if is_dataclass(kind) and kind not in (ModelConfig, RdmaConfig)}


def _check_type(cls: type, name: str, value: object, kind: object) -> None:
    allowed = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}.get(kind)  # pyright: ignore[reportArgumentType]
    if allowed is not None and (not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)):
        raise ConfigError(f"{name} must be of type {getattr(kind, '__name__', kind)}, got {value!r}")
    choices = next(field.metadata.get("choices") for field in fields(cls) if field.name == name)
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
