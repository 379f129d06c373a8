# SPDX-License-Identifier: Apache-2.0
"""An engine process whose model counts upwards: real scheduler, region and RDMA listener, and no arithmetic.

The first token of an answer is a checksum of the whole prompt, so that one wrong token in it shows.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from typing import Any

import numpy as np

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.link.rdma.listener import open_listener
from blink.rdma_config import RdmaConfig
from blink.region.layout import BATCH_HEADER
from blink.region.memory import create_region, publish_region
from blink.region.native import lib

VOCAB = 49152  # of the default model, whose tokenizer the frontends use
MAX_SEQUENCES = 16
MAX_MODEL_LEN = 768
ARENA_BYTES = 256 << 10  # small, so that every part of it is used again and again


def first_token(prompt: np.ndarray[Any, Any]) -> int:
    """Return what the model answers to a prompt that one step computes."""
    if len(prompt) == 1:
        return int(prompt[0] + 1) % VOCAB
    return int((prompt.astype(np.int64) * np.arange(1, len(prompt) + 1)).sum() % VOCAB)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    first = first_token(np.asarray(prompt))
    return [(first + i) % VOCAB for i in range(num_tokens)]


def build_config(namespace: argparse.Namespace) -> EngineConfig:
    """Return the configuration: room for whole prompts of all sequences in one step, so that no prompt is cut."""
    return EngineConfig(
        region=namespace.region,
        rdma_listen=namespace.rdma_listen,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=MAX_SEQUENCES * MAX_MODEL_LEN,
        num_queue_pairs=namespace.num_queue_pairs,
        max_sequences_per_worker=4 * MAX_SEQUENCES,
        prompt_arena_bytes=ARENA_BYTES,
        enable_prefix_caching=False,
        lease_timeout=namespace.lease_timeout,
        rdma=RdmaConfig(rdma_backend=namespace.rdma_backend, nixl_transports=namespace.nixl_transports),
    )


def run(namespace: argparse.Namespace) -> None:
    """Serve until killed."""
    config = build_config(namespace)
    listener = open_listener(config)
    blocks = 2 * MAX_SEQUENCES * MAX_MODEL_LEN // config.block_size
    geometry = build_geometry(config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, num_blocks=blocks)
    region = create_region(config.region, geometry, "counting")
    state = HostState(region)
    loop = lib.blink_loop_start(state.address)
    publish_region(region, config.region)
    if listener is not None:
        listener.start()
    print("counting engine: ready", flush=True)
    while (kind := lib.blink_loop_wait(loop, 1000)) != -2:
        if kind >= 0:
            compute(state)
            lib.blink_loop_finish(loop, 0)


def compute(state: HostState) -> None:
    """Compute one step."""
    rows = int(state.array("whole.header", BATCH_HEADER)[0]["num_rows"])
    starts = state.array("whole.query_starts", "i4")[: rows + 1].tolist()
    ids, sampled = state.array("whole.input_ids", "i4"), state.array("whole.sampled_tokens", "i4")
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        sampled[row] = first_token(ids[start:end])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--region", required=True)
    parser.add_argument("--rdma-listen", default="")
    parser.add_argument("--num-queue-pairs", type=int, default=48)
    # On a busy machine a frontend in the rig may be silent for seconds.
    parser.add_argument("--lease-timeout", type=float, default=60.0)
    parser.add_argument("--rdma-backend", default="verbs")
    parser.add_argument("--nixl-transports", default="rc")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    run(parser.parse_args())
