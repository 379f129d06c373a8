# SPDX-License-Identifier: Apache-2.0
"""`blink frontend`: one frontend worker alone."""

from __future__ import annotations

import gc
from argparse import Namespace
from dataclasses import replace

from blink.api.server import run_worker
from blink.cli.flags import build_config
from blink.config import FrontendConfig
from blink.host.process import raise_descriptor_limit
from blink.hub.localize import localize


def run(namespace: Namespace) -> int:
    """Serve until a signal arrives; return the exit status."""
    raise_descriptor_limit()
    gc.freeze()  # modules live as long as the process: no collection need walk through them
    config = build_config(FrontendConfig, namespace)
    # A frontend reads no weights: of a model on the hub it gets what describes it.
    model = localize(replace(config.model, load_format="dummy"))
    return run_worker(replace(config, model=replace(model, load_format=config.model.load_format)))
