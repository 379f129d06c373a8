# SPDX-License-Identifier: Apache-2.0
"""A scheduler with few places for automata, and requests with more automata than that."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.queue_pair import QueuePair, Submission
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from harness import Harness, Step, running, small_config

VOCAB = 97
PROMPT = [2, 7, 1, 8]
LONG = 58  # tokens: nearly all that a sequence may have
MANY = [
    Automaton(compile_structured(StructuredOutputsParams(choice=[f"a{index}", f"b{index}"])).data)
    for index in range(24)
]


def open_engine(
    num_automata: int, max_num_seqs: int = 24, step: Step = lib.blink_step
) -> AbstractContextManager[Harness]:
    """Return a harness with so many places, and room for all else."""
    config = small_config(max_num_seqs=max_num_seqs, max_sequences_per_worker=32, max_num_batched_tokens=256)
    sizes = {"num_blocks": 8 * 32, "vocab_bytes": 8, "num_automata": num_automata, "arena_bytes": 1 << 20}
    return running(config, step=step, **sizes)


def ask(pair: QueuePair, index: int, flow: int, count: int = LONG, *, best_effort: bool = False) -> int:
    """Submit a request of a flow whose text is bound by one of the automata; return its sequence."""
    submission = Submission(np.asarray(PROMPT, np.int32), (), 0, b"", flow, automaton=MANY[index])
    return pair.submit(submission, SamplingParams(max_tokens=count, best_effort=best_effort))
