# SPDX-License-Identifier: Apache-2.0
"""`blink engine`: one engine alone."""

from __future__ import annotations

import gc
from argparse import Namespace
from dataclasses import replace

from blink.cli.flags import build_config
from blink.cli.loading import check_there, load
from blink.config import EngineConfig
from blink.engine.vocabulary_child import VocabularyChild
from blink.host.logs import set_up_logging
from blink.host.process import raise_descriptor_limit
from blink.hub.localize import localize
from blink.region.files import check_unserved


def run(namespace: Namespace) -> int:
    """Run the engine until a signal arrives; return the exit status."""
    raise_descriptor_limit()
    config = build_config(EngineConfig, namespace)
    check_unserved(config.region)  # again later, but this is before torch and the model are loaded
    check_there("torch", "the engine")
    set_up_logging("info", config.log_format)
    config = replace(config, model=localize(config.model))
    child = VocabularyChild(config.model)  # before torch, whose threads a fork would leave behind
    boot = load("blink.engine.boot", "the engine")
    gc.freeze()  # modules live as long as the process: no collection need walk through torch's
    return boot.run_engine(config, child)
