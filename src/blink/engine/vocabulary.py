# SPDX-License-Identifier: Apache-2.0
"""The bytes of a model's tokens, for an engine that constrains texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from blink.config import EngineConfig
from blink.engine.vocabulary_child import VocabularyChild, load_reader
from blink.region.native import lib
from blink.text.vocabulary import Vocabulary

ReadVocabulary = Callable[[EngineConfig, int], Vocabulary]  # of as many tokens


def read_vocabulary(config: EngineConfig, vocab_size: int, child: VocabularyChild | None = None) -> Vocabulary:
    """Return the bytes of the model's tokens, which a child may have read; none where it has no tokenizer."""
    found = child.wait() if child is not None else None
    if found is not None:
        return Vocabulary.unpack(found).resize(vocab_size)
    return load_reader().read_vocabulary(config.model, vocab_size)


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
