# SPDX-License-Identifier: Apache-2.0
"""The draft head of an engine's model, and the memory that it takes for guesses and residuals."""

from __future__ import annotations

from torch import Tensor

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.kernels.batch import Batch
from blink.kernels.gpu.attention import heads
from blink.kernels.guesses import FindGuesses, count_blocks
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.models.mtp import MtpHead
from blink.models.weights.eagle_loader import load_eagle
from blink.models.weights.mtp_loader import load_mtp
from blink.runner.drafter import Drafter
from blink.runner.eagle import EagleDrafter
from blink.runner.mtp import MtpDrafter
from blink.runner.run import Runner


def add_drafter(runner: Runner, config: EngineConfig, guessing_rows: int = 0) -> None:
    """Load the head that is configured, if one is, for a model that runs on one rank.

    guessing_rows: of a step, whose guesses take blocks of the head's cache; 0: they lie elsewhere.

    Raises:
        ConfigError: the head does not fit the model or the device.
    """
    speculation, model = config.speculation, runner.model
    if not speculation.has_head:
        return
    head = load_mtp(config.model, model) if speculation.mtp else load_eagle(speculation.head, model)
    reason = heads.refuses(head.attention.head_dim)
    if guessing_rows and reason is not None:
        raise ConfigError(f"--speculative-config: the draft head has {reason}: add --device cpu")
    model.add_head(head, guessing_rows * count_blocks(speculation.num_tokens, config.block_size))
    runner.drafter = make_drafter(model, head, speculation.num_tokens)


def make_drafter(
    model: Decoder, head: EagleHead | MtpHead, num_tokens: int, find: FindGuesses | None = None
) -> Drafter:
    """Return what guesses so many tokens with a model's head; find: the rows, None: as the model's device does."""
    if isinstance(head, MtpHead):
        return MtpDrafter(model, head, num_tokens, find)
    return EagleDrafter(model, head, num_tokens, find)


def reserve_residuals(runner: Runner, batch: Batch, residual: Tensor) -> None:
    """Let the head, if there is one, keep residuals between the segments of a batch's steps in memory of its own."""
    if runner.drafter is not None:
        runner.drafter.reserve(batch, residual)


def count_head_bytes(model: Decoder, config: EngineConfig) -> int:
    """Return the bytes on a GPU of guesses in the head's cache, and of residuals between a step's segments."""
    kept = {*model.head.layers} if isinstance(model.head, EagleHead) else {}
    residuals = len(kept) * config.max_num_batched_tokens * model.spec.hidden_size
    spare = model.spec.cache_layout.spare_bytes(config.block_size, model.kv_dtype.itemsize)
    return spare + residuals * model.dtype.itemsize
