# SPDX-License-Identifier: Apache-2.0
"""`blink quantize`: write a model with matrices of 8 or 4 bits."""

from __future__ import annotations

from argparse import Namespace

from blink.cli.flags import build_config
from blink.config import ModelConfig
from blink.host.logs import set_up_logging
from blink.hub.localize import localize
from blink.quantize.config import QuantizeConfig
from blink.quantize.conversion import quantize


def run(namespace: Namespace) -> int:
    """Quantize the model; return the exit status."""
    set_up_logging("info", "text")
    model = localize(ModelConfig(model=namespace.model)).model
    quantize(model, namespace.output, build_config(QuantizeConfig, namespace))
    return 0
