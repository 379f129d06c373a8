# SPDX-License-Identifier: Apache-2.0
"""The Serve application: a deployment for each model, and the ingress before them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue, ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from blink.errors import ConfigError
from blink.ray.autoscaling import scale_on_waiting
from blink.ray.config import AppArgs, ModelArgs
from blink.ray.ingress import Ingress
from blink.ray.replica import Replica
from blink.ray.router import EngineRouter

_STATS_SECONDS = 1.0  # between two looks of the router at a replica's state
_INGRESS_REQUESTS = 1 << 20  # the replicas' queues are the ones that count


def build(arguments: Mapping[str, JsonValue]) -> Application:
    """Return the application.

    Raises:
        ConfigError: an argument makes no sense.
    """
    try:
        args = AppArgs.model_validate(arguments)
        models = args.all_models()
        configs = [model.serve_config() for model in models]
        engines = {model.served_name: _deploy(model) for model in models}
    except ValidationError as error:
        raise ConfigError(str(error)) from error
    deploy = serve.deployment(
        name="ingress",
        num_replicas=args.num_ingress_replicas,
        max_ongoing_requests=_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},  # it gets a place where replicas have all cores, as on a laptop
        graceful_shutdown_timeout_s=max(model.drain_seconds for model in models),
    )
    return deploy(Ingress).bind(engines, max(config.frontend.max_body_bytes for config in configs))


def _deploy(model: ModelArgs) -> Application:
    config = model.serve_config().engine
    options: dict[str, Any] = {"num_replicas": model.num_replicas}
    if model.autoscaling:
        policy = AutoscalingPolicy(policy_function=scale_on_waiting)
        values = {"target_ongoing_requests": config.max_num_seqs, "policy": policy, **model.autoscaling}
        options = {"autoscaling_config": AutoscalingConfig.model_validate(values)}
    router = {
        "request_router_class": EngineRouter,
        "request_router_kwargs": {"by_prefix": model.prefix_routing},
        "request_routing_stats_period_s": _STATS_SECONDS,
    }
    deploy = serve.deployment(
        name=re.sub(r"[^\w-]+", "-", model.served_name).strip("-"),
        max_ongoing_requests=config.max_sequences_per_worker,
        graceful_shutdown_timeout_s=model.drain_seconds,
        logging_config=LoggingConfig(enable_access_log=False),  # the ingress has the same lines
        request_router_config=RequestRouterConfig.model_validate(router),
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        **options,
    )
    return deploy(Replica).bind(model.command)
