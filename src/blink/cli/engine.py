# SPDX-License-Identifier: Apache-2.0
"""`blink engine`: one engine alone."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from blink.cli.flags import build_config
from blink.cli.loading import load
from blink.config import EngineConfig
from blink.host.logs import set_up_logging
from blink.host.process import raise_descriptor_limit
from blink.hub.localize import localize
from blink.region.files import check_unserved


def run(namespace: Namespace) -> int:
    """Run the engine until a signal arrives; return the exit status."""
    raise_descriptor_limit()
    config = build_config(EngineConfig, namespace)
    check_unserved(config.region)  # again later, but this is before torch and the model are loaded
    boot = load("blink.engine.boot", "the engine")
    set_up_logging("info", config.log_format)
    return boot.run_engine(replace(config, model=localize(config.model)))
