# SPDX-License-Identifier: Apache-2.0
"""What a model's layer that predicts one token further is like. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from blink.errors import ConfigError
from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec


def describe_mtp(spec: ModelSpec) -> ModelSpec:
    """Return the layer of a model as a model of one layer, which is like the model's last one with attention.

    Raises:
        ConfigError: models of the family have none that Blink reads.
    """
    if not FAMILIES[spec.architecture].has_mtp:
        raise ConfigError(
            f"--speculative-config: Blink reads no draft layer (MTP) of {spec.architecture}: use ngram or eagle3"
        )
    layer = next(layer for layer in reversed(spec.layers) if layer.mixer.attention is not None)
    return replace(spec, layers=(layer,), drafter=None, spare_blocks=0)


def count_mtp_weights(layer: ModelSpec) -> int:
    """Return the number of weights of a layer that describe_mtp() has described: it shares the vocabulary's."""
    hidden = layer.hidden_size
    return layer.count(lambda one: one.num_parameters(hidden)) + 2 * hidden * hidden + 3 * hidden
