# SPDX-License-Identifier: Apache-2.0
"""Replace names on the hub by paths on this machine, once, before anything is made of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.hub.name import HubName, is_inside, parse_name


def localize(config: ModelConfig) -> ModelConfig:
    """Return the configuration with models of the hub downloaded: whoever gets it asks no hub, and has no token.

    Raises:
        ConfigError: there is no such model, or it cannot be had.
    """
    name, tokenizer = _name_of(config.model), _name_of(config.tokenizer)
    if config.revision and name is None:
        raise ConfigError("--revision is of a model on the hub; MODEL is none")
    if config.tokenizer_revision and tokenizer is None:
        raise ConfigError("--tokenizer-revision is of a tokenizer on the hub; --tokenizer names none")
    changes: dict[str, str | tuple[str, ...]] = {}
    if name is not None:
        hub = _hub(config, name, config.revision)
        changes["model"] = str(_fetching("fetch_model")(hub, name.label, config.load_format))
        changes["served_model_name"] = config.served_model_name or (config.model,)
    if tokenizer is not None:
        hub = _hub(config, tokenizer, config.tokenizer_revision)
        changes["tokenizer"] = str(_fetching("fetch_tokenizer")(hub, tokenizer.label))
    return replace(config, revision="", tokenizer_revision="", hf_token="", download_dir="", **changes)


def find_cached(model: str) -> str:
    """Return the path of a model that a command names, without a download.

    Raises:
        ConfigError: it is on the hub and not in the cache.
    """
    name = _name_of(model)
    if name is None:
        return model
    client = import_module("blink.hub.client")
    path = _fetching("find_cached")(client.Hub(name.repository, name.revision), name.label)
    if path is None:
        raise ConfigError(f"MODEL '{model}' is not on this machine yet: run `blink pull {model}`")
    return str(path)


def _name_of(text: str) -> HubName | None:
    """Return the hub's name; None for what lies on this machine, and for what can lie nowhere else."""
    return None if not text or Path(text).expanduser().exists() else parse_name(text)


def _hub(config: ModelConfig, name: HubName, revision: str) -> object:
    if name.revision and revision and name.revision != revision:
        raise ConfigError(f"{name.repository} has two revisions: @{name.revision} and {revision}")
    revision = revision or name.revision
    if revision and not is_inside(revision):
        raise ConfigError(f"{name.repository} can have no revision {revision!r}; change --revision")
    client = import_module("blink.hub.client")
    return client.Hub(name.repository, revision, config.hf_token, config.download_dir)


def _fetching(function: str) -> Callable[..., Path | None]:
    """Return a function that needs the hub's library, which takes most of a second to load."""
    return getattr(import_module("blink.hub.fetch"), function)
