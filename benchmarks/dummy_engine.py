# SPDX-License-Identifier: Apache-2.0
"""An engine with random weights in this process, and a client of it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_client import connect

from blink.config import EngineConfig, ModelConfig
from blink.engine.boot import create_engine
from blink.link.client import EngineClient

_MAX_NUM_SEQS: int = EngineConfig.__dataclass_fields__["max_num_seqs"].default


def make_config(
    model: ModelConfig,
    *,
    device: str,
    num_blocks: int,
    max_num_seqs: int = _MAX_NUM_SEQS,
    ranks: int = 1,
    deterministic: bool = False,
) -> EngineConfig:
    """Return the configuration of an engine without a prefix cache, whose decoding steps no prefill preempts.

    num_blocks: of the KV cache; 0: as many as there is memory for; ranks: that share the model.
    """
    return EngineConfig(
        region=f"bench-{os.getpid()}-{secrets.token_hex(3)}",
        model=model,
        device=device,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=ranks,
        deterministic=deterministic,
        enable_prefix_caching=False,
        overtake_share=0.0,
    )


@contextmanager
def run_engine(model: ModelConfig, **options: Any) -> Iterator[tuple[EngineClient, str]]:
    """Serve a model; yield a client and the region. options: make_config()'s."""
    config = make_config(model, **options)
    engine = create_engine(config)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    client = connect(config.region)
    yield client, config.region
    client.close()
    engine.stop()
    thread.join(10)
