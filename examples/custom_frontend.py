# SPDX-License-Identifier: Apache-2.0
"""A frontend of your own: no HTTP and no text, only token ids through a queue pair in shared memory.

    blink engine --region demo        # in another terminal
    python examples/custom_frontend.py demo

The engine takes no other path: `blink frontend` uses these calls too. docs/protocol.md describes the memory.
"""

import select
import sys
import time

import numpy as np

from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import CqeKind, FinishReason
from blink.sampling_params import SamplingParams

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is", for SmolLM2
TICK_SECONDS = 0.25

client = EngineClient(ShmConnector(sys.argv[1]), engine_timeout=5.0)
try:
    # tick() attaches to a queue pair, renews its lease and looks whether the engine lives.
    while not client.ready:
        client.tick()
        if not client.ready:
            print(f"waiting: {client.unavailable_reason}")
            time.sleep(TICK_SECONDS)

    sequence = client.submit(np.array(PROMPT, np.int32), SamplingParams(temperature=0, max_tokens=8), seed=0)
    finished = False
    while not finished:
        # The client's file descriptor is readable when completions have arrived.
        select.select([client], [], [], TICK_SECONDS)
        if lost := client.tick():
            sys.exit(f"the engine is gone: {lost}")
        for completion in client.drain():
            if completion["kind"] == CqeKind.TOKEN:
                print(completion["token"], end=" ", flush=True)
            finished |= completion["finish_reason"] != FinishReason.NONE or completion["kind"] == CqeKind.REJECTED
    print()
finally:
    client.close()
