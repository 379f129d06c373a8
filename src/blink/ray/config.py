# SPDX-License-Identifier: Apache-2.0
"""The arguments of the Serve application, as its config file or `serve run blink.ray:app NAME=VALUE` gives them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from blink.cli.flags import build_config
from blink.cli.main import parse
from blink.config import ServeConfig
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path

# What a replica decides itself: where its frontend listens, and by which region it finds its engine.
_OWN_FLAGS = ("model", "served_model_name", "host", "port", "uds", "region", "frontend_workers", "ssl_certfile")
_OWN_FLAGS += ("data_parallel_size",)
# A replica's only client is the ingress; figures of one replica would look like those of all.
_REPLICA_FLAGS = ("--no-page", "--max-client-share=1")


class ModelArgs(BaseModel):
    """One model, and how many engines serve it with what of the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""  # directory or .gguf file, the same on each node; empty: SmolLM2-135M-Instruct
    name: str = ""  # in the API; empty: MODEL
    flags: dict[str, str | bool | int | float | list[str]] = Field(default_factory=dict)  # of `blink serve`
    num_replicas: int = Field(1, ge=1)
    autoscaling: dict[str, JsonValue] = Field(default_factory=dict)  # of Serve's AutoscalingConfig, for num_replicas
    num_cpus: float = Field(1.0, ge=0)  # of each replica; the CPU engine gets as many threads
    num_gpus: float = Field(0.0, ge=0)  # of each replica; 0: the CPU engine
    prefix_routing: bool = True  # off: by load alone, whatever replicas have in their caches
    drain_seconds: float = Field(600.0, ge=0)  # for a replica's open requests when it is to stop

    @property
    def served_name(self) -> str:
        """The model's name in the API, as `blink serve` would derive it."""
        return self.name or self.model or default_model_path().name.split(".")[0]

    @property
    def command(self) -> list[str]:
        """Arguments of `blink`, but for the socket."""
        device = [] if self.num_gpus else ["--device=cpu"]
        model = [f"--model={self.model}"] if self.model else []
        return [
            "serve",
            *model,
            f"--served-model-name={self.served_name}",
            *_REPLICA_FLAGS,
            *device,
            *_spell(self.flags),
        ]

    def serve_config(self) -> ServeConfig:
        """Return what `blink serve` makes of the flags.

        Raises:
            ConfigError: a flag is unknown, is the replica's own, or has a value that makes no sense.
        """
        for flag in self.flags:
            if flag.replace("-", "_") in _OWN_FLAGS:
                raise ConfigError(f"{self.served_name}: `flags` cannot hold {flag}, which each replica sets itself")
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                namespace = parse(self.command)
        except SystemExit as error:
            raise ConfigError(f"{self.served_name}: {said.getvalue().strip()}") from error
        return build_config(ServeConfig, namespace)


class AppArgs(ModelArgs):
    """The application: one model, described by the same fields, or several."""

    models: list[ModelArgs] = Field(default_factory=list[ModelArgs])
    num_ingress_replicas: int = Field(1, ge=1)

    def all_models(self) -> list[ModelArgs]:
        """Return each model.

        Raises:
            ConfigError: a model is described twice.
        """
        own = self.model_fields_set - {"models", "num_ingress_replicas"}
        if self.models and own:
            raise ConfigError(f"give {', '.join(sorted(own))} in each of `models`, not beside them")
        models = self.models or [ModelArgs(**{name: getattr(self, name) for name in own})]
        names = [model.served_name for model in models]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models are called {name}: give each another `name`")
        return models


def _spell(flags: dict[str, str | bool | int | float | list[str]]) -> Iterator[str]:
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}={each}" for each in (value if isinstance(value, list) else [value]))
