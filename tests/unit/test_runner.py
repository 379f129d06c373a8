# SPDX-License-Identifier: Apache-2.0
"""What a runner keeps beside its model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

from blink.config import ModelConfig
from blink.models.weights.loader import load_model
from model_driver import Driver
from tiny_model import write_tiny_model


def test_weights_are_freed_with_their_runner_without_a_collection(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, vocab_size=512)
    model = load_model(ModelConfig(model=str(path), load_format="dummy"), torch.device("cpu"), torch.float32)
    driver = Driver(model)
    driver.add([1, 2, 3], 4)
    gc.collect()
    gc.disable()
    try:
        driver.run()
        weight = weakref.ref(model.layers[0].qkv)
        del driver, model
        assert weight() is None
    finally:
        gc.enable()
