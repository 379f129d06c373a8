# SPDX-License-Identifier: Apache-2.0
"""The bytes of a model's tokens, for an engine that constrains texts."""

from __future__ import annotations

import logging

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.weights.files import resolve_model
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
