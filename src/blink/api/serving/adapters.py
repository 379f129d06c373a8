# SPDX-License-Identifier: Apache-2.0
"""The adapters that a server answers to, by their names."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from blink.adapters.client import AdapterClient, rules_with
from blink.adapters.peft_config import read_config
from blink.config import FrontendConfig
from blink.errors import BadRequestError, BlinkError, ConfigError, NotFoundError
from blink.link.client import EngineClient
from blink.lora_config import allows_updating
from blink.text.prompt import PromptRules

_MAX_NAME = 256
_MAX_ADAPTERS = 10_000


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter and the name that requests call it."""

    name: str
    path: str
    parent: str | None = None  # the base model's name, where its configuration gives one


class ServedAdapters:
    """Knows the adapters of one worker. Use from its event loop only."""

    def __init__(self, config: FrontendConfig, client: EngineClient) -> None:
        """Take the adapters of --lora-modules; each is loaded when it is asked for.

        Raises:
            ConfigError: one is malformed, or its configuration is not to be obeyed here.
        """
        lora = config.lora
        if config.lora_modules and not lora.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora")
        if lora.enable_lora and (config.rdma_engine or config.data_parallel_size > 1):
            raise ConfigError("--enable-lora goes neither with --rdma nor with --data-parallel-size yet")
        self.is_enabled = lora.enable_lora
        self.may_change = lora.enable_lora and allows_updating(config.allow_runtime_lora_updating)
        self._max_loras, self._max_rank = lora.max_loras, lora.max_lora_rank
        self._client = AdapterClient(config.region, client)
        self._served: dict[str, ServedAdapter] = {}
        self._changes = asyncio.Lock()
        self._changed = time.time()
        self._shown = ("", "")
        for text in config.lora_modules:
            adapter = read_module(text)
            if adapter.name in self._served or adapter.name in config.model.served_model_name:
                raise ConfigError(f"--lora-modules: {adapter.name!r} is the name of two models")
            self._check(adapter)
            self._served[adapter.name] = adapter

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all adapters."""
        return tuple(self._served)

    def find(self, name: str | None) -> ServedAdapter | None:
        """Return an adapter; None: no adapter has the name."""
        return self._served.get(name or "")

    async def rules_of(self, name: str | None, rules: PromptRules) -> PromptRules:
        """Return the rules of a request for a model of a name; its adapter is loaded if it is not there.

        Raises:
            BadRequestError: its files are damaged or do not fit the model.
            OverloadedError: sequences use all adapters in memory.
            EngineUnavailableError: the engine does not answer.
        """
        adapter = self.find(name)
        return rules if adapter is None else rules_with(rules, await self._client.hold_soon(adapter.path))

    async def load(self, name: str, path: str, base_names: tuple[str, ...], *, in_place: bool = False) -> None:
        """Serve an adapter from now on; in_place: also where the name is served, whose files are read again.

        Raises:
            BadRequestError: the name is taken or none, or the files are damaged or do not fit the model.
            OverloadedError: sequences use all adapters in memory.
            EngineUnavailableError: the engine does not answer.
        """
        check_name(name)
        async with self._changes:
            before = self._served.get(name)
            if name in base_names or (before is not None and not in_place):
                raise BadRequestError(f"The lora adapter '{name}' has already been loaded.", "lora_name")
            if len(self._served) >= _MAX_ADAPTERS:
                raise BadRequestError(f"This server takes at most {_MAX_ADAPTERS} adapters.", "lora_name")
            adapter = ServedAdapter(name, _resolve(path))
            await self._client.hold_soon(adapter.path, anew=True)
            self._served[name] = adapter
            if before is not None and before.path != adapter.path:
                await self._drop(before)

    async def unload(self, name: str) -> None:
        """Serve an adapter no longer.

        Raises:
            NotFoundError: there is none of the name.
            EngineUnavailableError: the engine does not answer.
        """
        async with self._changes:
            if name not in self._served:
                raise NotFoundError(f"The lora adapter '{name[:_MAX_NAME]}' cannot be found.", "lora_name")
            await self._drop(self._served.pop(name))

    async def _drop(self, adapter: ServedAdapter) -> None:
        """Let the engine free an adapter that no name has any more."""
        if all(other.path != adapter.path for other in self._served.values()):
            await self._client.drop(adapter.path)

    def render_gauge(self, labels: str) -> bytes:
        """Return vLLM's gauge of adapters as Prometheus text; labels: of the model and the engine."""
        if not self.is_enabled:
            return b""
        uses = {name: self._client.uses(adapter.path) for name, adapter in self._served.items()}
        shown = tuple(",".join(name for name, use in uses.items() if use[kind]) for kind in (0, 1))
        if shown != self._shown:
            self._shown, self._changed = (shown[0], shown[1]), time.time()
        text = f'max_lora="{self._max_loras}",running_lora_adapters="{shown[0]}",waiting_lora_adapters="{shown[1]}"'
        head = "# HELP vllm:lora_requests_info Adapters that run and wait; the value: when that changed.\n"
        kind = "# TYPE vllm:lora_requests_info gauge\n"
        return f"{head}{kind}vllm:lora_requests_info{{{text}{labels}}} {self._changed!r}\n".encode()

    def _check(self, adapter: ServedAdapter) -> None:
        """Refuse what cannot be obeyed before the engine reads the tensors."""
        try:
            check_name(adapter.name)
            read_config(Path(adapter.path), self._max_rank)
        except BlinkError as error:
            raise ConfigError(f"--lora-modules {adapter.name}: {error.message}") from error


def read_module(text: str) -> ServedAdapter:
    """Return the adapter that a value of --lora-modules names.

    Raises:
        ConfigError: it is neither NAME=PATH nor a JSON object of name and path.
    """
    told = "--lora-modules takes NAME=PATH, or a JSON object of name, path and base_model_name"
    name, has_path, path = text.partition("=")
    parent = None
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{told}, got {text[:_MAX_NAME]!r}") from error
        if values.keys() - {"name", "path", "base_model_name"} or not all(isinstance(v, str) for v in values.values()):
            raise ConfigError(f"{told}, got {text[:_MAX_NAME]!r}")
        name, has_path, path = values.get("name", ""), "=", values.get("path", "")
        parent = values.get("base_model_name")
    if not name or not has_path or not path:
        raise ConfigError(f"{told}, got {text[:_MAX_NAME]!r}")
    return ServedAdapter(name, _resolve(path), parent)


def _resolve(path: str) -> str:
    """Return a folder's whole path, for an engine that works in another one."""
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequestError("lora_path is no path.", "lora_path") from error


def check_name(name: str) -> None:
    """Refuse what would not do as a model's name, or as a label of a metric.

    Raises:
        BadRequestError: it does not.
    """
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or {*name} & {*'",\\'}:
        told = f"lora_name must hold 1 to {_MAX_NAME} printable characters without quotes, commas and backslashes."
        raise BadRequestError(told, "lora_name")
