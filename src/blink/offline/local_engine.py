# SPDX-License-Identifier: Apache-2.0
"""An engine in this process, reached through the same queue pairs as from a frontend, and what plans its requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from blink.adapters.client import AdapterClient, rules_with
from blink.engine.thread import EngineThread
from blink.errors import BadRequestError, EngineUnavailableError
from blink.link.client import EngineClient, RegionInfo
from blink.link.shm import ShmConnector
from blink.offline.options import read_options
from blink.offline.public_tokenizer import PublicTokenizer
from blink.region.layout import Task
from blink.request.planner import Plan, Planner
from blink.request.source import Source
from blink.request.vectors import check_task
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets, load_assets
from blink.text.prompt import PromptRules

TICK_SECONDS = 0.25
START_SECONDS = 30.0
_ENGINE_TIMEOUT = 60.0
_LEASE_GRACE = 60.0  # seconds that planning a prompt may take while the engine computes others of the call
_TOKENIZATION = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")


class LocalEngine:
    """Boot an engine on a thread, and hold the client of it; the client is for one thread at a time."""

    def __init__(self, model: str, options: dict[str, Any], *, waits_when_paused: bool = False) -> None:
        """Return when the engine is loaded; waits_when_paused: whether requests are planned then, not refused.

        Raises:
            ConfigError: an option is unknown or asks for what is not done here, or model and machine do not fit.
        """
        self.config = read_options(model, options)
        self.assets: ModelAssets = load_assets(self.config.frontend)
        self.planner = Planner(self.assets)
        self._thread = EngineThread(self.config.engine)
        # In one process with the engine, silence means a busy interpreter and not a dead engine.
        connector = ShmConnector(self.config.engine.region)
        self.client = EngineClient(connector, engine_timeout=_ENGINE_TIMEOUT, lease_grace=_LEASE_GRACE)
        self._adapters = AdapterClient(self.config.engine.region, self.client)
        self.is_closed, self._waits_when_paused = False, waits_when_paused

    @property
    def info(self) -> RegionInfo:
        """Return what the engine says of itself.

        Raises:
            EngineUnavailableError: it was closed, or is not connected.
        """
        if self.is_closed:
            raise EngineUnavailableError("This LLM is closed.")
        if not self.client.ready or self.client.info is None:
            raise EngineUnavailableError(self.client.unavailable_reason)
        return self.client.info

    def look(self) -> bool:
        """Renew the lease and say whether the engine is connected.

        Raises:
            EngineUnavailableError: it was closed.
        """
        if self.is_closed:
            raise EngineUnavailableError("This LLM is closed.")
        self.client.tick()
        return self.client.ready

    def await_ready(self) -> RegionInfo:
        """Renew the lease, wait until the engine is connected, and return what it is.

        Raises:
            EngineUnavailableError: it was closed, or does not answer.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.look():
            if time.monotonic() > deadline:
                raise EngineUnavailableError(self.client.unavailable_reason)
            time.sleep(0.01)
        return self.info

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        if not self.is_closed:
            self.is_closed = True
            self.client.close()
            self._thread.stop()

    def plan(
        self,
        source: Source,
        params: SamplingParams,
        rules: PromptRules,
        engine: RegionInfo,
        task: Task = Task.GENERATE,
    ) -> Plan:
        """Plan the request of one prompt; its adapter is loaded if it is not there.

        Raises:
            BadRequestError: the engine cannot do it; `param` names what to change.
            EngineUnavailableError: it is paused, and requests are not to wait.
        """
        check_task(task, engine)
        if self.client.is_paused and not self._waits_when_paused:
            raise EngineUnavailableError("This LLM is paused, sleeps or lacks weights: resume() or wake_up() it first.")
        rules = rules._replace(cache_salt=source.cache_salt)
        if (lora := source.lora_request) is not None:
            rules = rules_with(rules, self._adapters.hold(lora.lora_path, anew=lora.load_inplace))
        # A caller may have changed the parameters since they were checked.
        return self.planner.plan_now([source.prompt], replace(params), rules, engine)

    @property
    def tokenizer(self) -> PublicTokenizer:
        """Return the model's tokenizer with the methods that scripts call."""
        return PublicTokenizer(self.assets)

    @property
    def default_params(self) -> SamplingParams:
        """Return the model's own sampling defaults."""
        return SamplingParams(**cast("dict[str, Any]", self.assets.sampling_defaults))


def rules_of(param: str, *, add_special_tokens: bool, given: Mapping[str, Any] | None) -> PromptRules:
    """Return how prompts are treated, with what `tokenization_kwargs` says of it.

    Raises:
        BadRequestError: it says what is not known here.
    """
    values = {name: value for name, value in (given or {}).items() if value is not None}
    if unknown := values.keys() - {*_TOKENIZATION}:
        known = ", ".join(_TOKENIZATION)
        raise BadRequestError(
            f"tokenization_kwargs has no {min(unknown)!r} here; known: {known}.", "tokenization_kwargs"
        )
    return PromptRules(
        add_special_tokens=bool(values.get("add_special_tokens", add_special_tokens)),
        truncate=values.get("truncate_prompt_tokens"),
        truncate_right=values.get("truncation_side", "left") == "right",
        param=param,
    )


def refuse(**given: object) -> None:
    """Refuse arguments that ask for what is not done here.

    Raises:
        BadRequestError: one is there; `param` names it.
    """
    for name, value in given.items():
        if value:
            raise BadRequestError(f"{name} is not supported: it is not built for this call.", name)


def priorities_of(priority: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    """Return the priority of each prompt.

    Raises:
        BadRequestError: a list is shorter or longer than that of the prompts.
    """
    if priority is None or isinstance(priority, int):
        return [priority] * count
    if len(priority) != count:
        raise BadRequestError(f"{count} prompts need as many priorities, got {len(priority)}.", "priority")
    return priority


def with_priority(params: SamplingParams, priority: int | None) -> SamplingParams:
    """Return parameters with a priority, where a call gives one."""
    return params if priority is None else replace(params, priority=priority)
