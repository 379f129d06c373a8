# SPDX-License-Identifier: Apache-2.0
"""Read the bytes of a model's tokens from its files."""

from __future__ import annotations

import logging

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.weights.files import resolve_model
from blink.text.tokenizer import NoTokenizer, Tokenizer
from blink.text.tokenizer_parts import load_parts
from blink.text.vocabulary import Vocabulary, list_vocabulary

logger = logging.getLogger("blink.engine")


def read_vocabulary(config: ModelConfig, vocab_size: int) -> Vocabulary:
    """Return the bytes of the model's tokens; none where it has no tokenizer."""
    return list_vocabulary(_load_tokenizer(config), vocab_size)


def read_whole_vocabulary(config: ModelConfig, most: int) -> Vocabulary | None:
    """Return the bytes of the tokens up to the largest id that the tokenizer knows; None: these are more than `most`.

    As read_vocabulary(), for whoever does not know how many tokens the model has.
    """
    tokenizer = _load_tokenizer(config)
    return list_vocabulary(tokenizer, tokenizer.end_id) if tokenizer.end_id <= most else None


def _load_tokenizer(config: ModelConfig) -> Tokenizer:
    try:
        return load_parts(config, resolve_model(config.model))[0]
    except ConfigError as error:
        logger.warning("no structured outputs: %s", error)
        return NoTokenizer()
