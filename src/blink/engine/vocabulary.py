# SPDX-License-Identifier: Apache-2.0
"""The bytes of a model's tokens, for an engine that constrains texts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.weights.files import resolve_model
from blink.region.native import lib
from blink.text.tokenizer import NoTokenizer
from blink.text.tokenizer_parts import load_parts
from blink.text.vocabulary import Vocabulary, list_vocabulary

logger = logging.getLogger("blink.engine")


def read_vocabulary(config: EngineConfig, vocab_size: int) -> Vocabulary:
    """Return the bytes of the model's tokens; none where it has no tokenizer."""
    try:
        tokenizer = load_parts(config.model, resolve_model(config.model.model))[0]
    except ConfigError as error:
        logger.warning("no structured outputs: %s", error)
        tokenizer = NoTokenizer()
    return list_vocabulary(tokenizer, vocab_size)


def write_vocabulary(vocabulary: Vocabulary, array: Callable[[str, torch.dtype], Tensor]) -> None:
    """Fill the scheduler's arrays of tokens; `array` finds one by name, flat, as a type.

    The table that finds tokens by their bytes is filled where it has entries.
    """
    array("token_starts", torch.int32).copy_(torch.from_numpy(vocabulary.starts.view("i4")))
    array("token_text", torch.uint8).copy_(torch.tensor(vocabulary.text))
    index = np.zeros(array("token_index", torch.int32).shape, np.int32)
    starts, text = vocabulary.starts.ctypes.data, vocabulary.text.ctypes.data
    lib.blink_index_tokens(starts, text, len(vocabulary.starts) - 1, len(index) // 2, index.ctypes.data)
    array("token_index", torch.int32).copy_(torch.from_numpy(index))
