# SPDX-License-Identifier: Apache-2.0
"""Sizes of region and scheduler state, derived once from the configuration and the model's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from blink.bits import power_of_two
from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.pooling import Pooling
from blink.plan.site import Bucket
from blink.region.layout import CONSTANTS, GEOMETRY, Task

_SECOND = 1_000_000_000
_MILLISECOND = 1_000_000
_SNAPSHOT_PART = 4  # of the KV cache's bytes, those of snapshots of recurrent states
_LEAST_SNAPSHOTS = 8
_ROUND_SEQUENCES = 8
_SNAPSHOT_INTERVAL = 64  # blocks: of 16 tokens, those of an answer of 1,024


def count_slots(max_num_seqs: int) -> int:
    """Return of how many sequences the model has data at once: running ones and as many parked."""
    return 2 * max_num_seqs


def fit_sequences(max_num_seqs: int, free: int, slot_bytes: int) -> int:
    """Return how many sequences run at once, so that the states of all slots take at most half of the free bytes.

    slot_bytes: what recurrent layers keep of a sequence; 0: there are none. At least one runs, at most max_num_seqs.
    """
    if slot_bytes == 0:
        return max_num_seqs
    most = free // 2 // (count_slots(1) * slot_bytes)
    return min(max_num_seqs, max(most // _ROUND_SEQUENCES * _ROUND_SEQUENCES or most, 1))


def count_snapshots(num_blocks: int, block_bytes: int, slot_bytes: int) -> int:
    """Return of how many prefixes recurrent states are kept: of as many as take a part of the KV cache's memory.

    slot_bytes: what recurrent layers keep of a sequence; 0: there are none.
    """
    if slot_bytes == 0:
        return 0
    return min(max(num_blocks * block_bytes // _SNAPSHOT_PART // slot_bytes, _LEAST_SNAPSHOTS), num_blocks)


def spare_snapshots(room: int, slot_bytes: int) -> int:
    """Return how many of some bytes the KV cache may take, so that the rest holds count_snapshots()."""
    if slot_bytes == 0:
        return room
    return room - max(room // (_SNAPSHOT_PART + 1), _LEAST_SNAPSHOTS * slot_bytes)


def count_rows(config: EngineConfig) -> int:
    """Return the most rows of a step."""
    return config.speculation.count_rows(config.max_num_seqs, config.max_num_batched_tokens)


def decode_graphs(max_num_seqs: int) -> list[tuple[int, int]]:
    """Return the sizes (tokens, rows) of decode graphs: 1, 2, 4, then by 8 to 32, by 16 to 256 and by 64 beyond.

    On an H200 a graph of 40 rows takes longer than one of 48, one of 56 no less than one of 64.
    """
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, 256, 16), *range(256, max_num_seqs, 64)]
    return [(rows, rows) for rows in (*(rows for rows in steps if rows < max_num_seqs), max_num_seqs)]


def mixed_graphs(max_num_batched_tokens: int, max_num_seqs: int, *, is_patient: bool = False) -> list[tuple[int, int]]:
    """Return the sizes of mixed graphs, by tokens: close where prompts ride along, by 1024 from 2048 on.

    On an H200 a graph of 96 or 112 tokens takes as long as one of 128, one of 288 as one of 320, one of 448 longer than
    one of 512. is_patient: an engine's with patient_steps, which also takes smaller steps.
    """
    steps = [8, 16, 24] if is_patient else [16]
    steps += [*range(32, 96, 16), *range(128, 256, 32), 256, 320, 384, 512, 640, *range(768, 2048, 256)]
    steps += range(2048, max_num_batched_tokens, 1024)
    sizes = [*(tokens for tokens in steps if tokens < max_num_batched_tokens), max_num_batched_tokens]
    return [(tokens, min(tokens, max_num_seqs)) for tokens in sizes]


def graph_sizes(geometry: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return (tokens, rows) of each graph, in the order of the scheduler's indices."""
    return geometry["graphs"][: int(geometry["num_graphs"])].tolist()


class StepGraph(NamedTuple):
    """What a graph computes."""

    bucket: Bucket
    is_scoring: bool  # prompts too
    runs_whole: bool  # never in segments


def list_graphs(geometry: np.ndarray[Any, Any]) -> list[StepGraph]:
    """Return what each graph computes, in the order of the scheduler's indices."""
    num_plain, num_decode = int(geometry["num_plain_graphs"]), int(geometry["num_decode_graphs"])
    captures_guesses = bool(geometry["has_draft_head"]) and num_plain < int(geometry["num_graphs"])
    found: list[StepGraph] = []
    for index, size in enumerate(graph_sizes(geometry)):
        plain = index % num_plain
        is_scoring = plain >= int(geometry["first_scoring_graph"])
        more = {"does_more": index >= num_plain, "guesses": captures_guesses}
        bucket = Bucket.of_graph(*size, decoding=plain < num_decode, **more)
        found.append(StepGraph(bucket, is_scoring, is_scoring or bool(geometry["vector_width"])))
    return found


def build_geometry(
    config: EngineConfig,
    *,
    max_model_len: int,
    vocab_size: int,
    num_blocks: int,
    vocab_bytes: int = 0,
    log_entries: int = 0,
    num_snapshots: int = 0,
    windows: Mapping[str, int] | None = None,
    others: Mapping[str, int] | None = None,
    captures_larger: bool = False,
) -> np.ndarray[Any, Any]:
    """Return the Geometry (0-dimensional, dtype layout.GEOMETRY) of an engine.

    num_snapshots: of recurrent states, for the prefix cache; windows: the fields of window_sizes(); others: of
    pooling_sizes(), of blocks in host memory, and patient_steps; captures_larger: whether steps that do more have own
    graphs.

    Raises:
        ConfigError: options contradict each other or the KV cache is too small for one sequence.
    """
    max_blocks = _count_max_blocks(max_model_len, config.block_size, num_blocks)
    values: dict[str, int] = {
        "arena_bytes": _arena_bytes(config, max_model_len, max_blocks),
        "max_num_seqs": config.max_num_seqs,
        "num_slots": count_slots(config.max_num_seqs),
        "max_model_len": max_model_len,
        "block_size": config.block_size,
        "num_blocks": num_blocks,
        "max_blocks": max_blocks,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_snapshots": num_snapshots,
        "snapshot_interval": _SNAPSHOT_INTERVAL,
        "vocab_size": vocab_size,
        "prefix_caching": config.enable_prefix_caching,
        "priority_policy": config.scheduling_policy == "priority",
        "trace_entries": 4096,
        "hash_entries": power_of_two(2 * num_blocks),
        "lru_entries": power_of_two(4 * num_blocks),
        "log_entries": log_entries,
        "num_automata": min(2 * config.max_num_seqs, CONSTANTS["max_automata"]),
    }
    values |= dict(windows or {}) | dict(others or {}) | config.sizes
    values |= config.speculation.sizes(max_model_len, vocab_size, knows_bytes=vocab_bytes > 0)
    values |= _times(config) | {"max_rows": count_rows(config)}
    values["vocab_bytes"] = vocab_bytes
    values |= _queue_sizes(config, values.get("vector_width", 0), values["max_rows"])
    return _fill(values, config, 1 + captures_larger)


def _fill(values: Mapping[str, int], config: EngineConfig, times: int) -> np.ndarray[Any, Any]:
    """Return a geometry with these fields, and each graph so many times."""
    geometry = np.zeros((), GEOMETRY)
    for name, value in values.items():
        geometry[name] = value
    _set_graphs(geometry, config, times)
    return geometry


def count_window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Return the window blocks of a row of so many tokens at most, as most_window_blocks() of windows.h does."""
    return -(-(window - 1 + CONSTANTS["rollback_tokens"] + chunk) // block_size) + 1


def _set_graphs(geometry: np.ndarray[Any, Any], config: EngineConfig, times: int) -> None:
    decode = decode_graphs(int(geometry["max_rows"]))
    is_patient = bool(geometry["patient_steps"])
    mixed = mixed_graphs(config.max_num_batched_tokens, config.max_num_seqs, is_patient=is_patient)
    scoring = [] if geometry["vector_width"] else mixed
    plain = [*decode, *mixed, *scoring]
    graphs = plain * times
    if len(graphs) > CONSTANTS["max_graphs"]:
        raise ConfigError(f"{len(graphs)} graphs are too many: lower --max-num-seqs or --max-num-batched-tokens")
    geometry["num_decode_graphs"], geometry["num_graphs"] = len(decode), len(graphs)
    geometry["first_scoring_graph"], geometry["num_plain_graphs"] = len(decode) + len(mixed), len(plain)
    geometry["graphs"][: len(graphs)] = graphs


def _queue_sizes(config: EngineConfig, vector_width: int, max_rows: int) -> dict[str, int]:
    """Return the fields of queue pairs; vector_width: 0 where the model generates."""
    completions = _most_completions(vector_width) * max_rows
    return {
        "num_queue_pairs": config.num_queue_pairs,
        "sq_entries": power_of_two(2 * config.max_sequences_per_worker),
        "cq_entries": power_of_two(completions + config.max_sequences_per_worker),
        "sequences_per_queue_pair": config.max_sequences_per_worker,
    }


def _most_completions(vector_width: int) -> int:
    """Return what one sequence needs of a completion queue: a sample's, or the vectors of two steps.

    So that the next step is computed while the frontend reads. vector_width: 0 where the model generates.
    """
    if vector_width == 0:
        return CONSTANTS["max_logprobs"] + 1
    return 2 * (-(-vector_width // CONSTANTS["values_of_cqe"]) + 1)


def _arena_bytes(config: EngineConfig, max_model_len: int, max_blocks: int) -> int:
    longest = max_model_len * 4 + max_blocks * CONSTANTS["block_hash_bytes"]
    longest += CONSTANTS["max_stop_tokens"] * 4 + CONSTANTS["max_logit_biases"] * 8
    return -(-(config.prompt_arena_bytes or max(8 << 20, 4 * longest)) // 64) * 64


def _times(config: EngineConfig) -> dict[str, int]:
    """Return the fields that hold times and shares of time."""
    return {
        "lease_timeout_ns": int(config.lease_timeout * _SECOND),
        "stall_timeout_ns": int(config.stall_timeout * _SECOND),
        "max_queue_age_ns": int(config.max_queue_age * _SECOND),
        "step_target_ns": int(config.step_target_ms * _MILLISECOND),
        "urgent_tpot_target_ns": int(config.urgent_tpot_target_ms * _MILLISECOND),
        "tpot_target_ns": int(config.tpot_target_ms * _MILLISECOND),
        "best_effort_share": round(config.best_effort_share * 1000),
        "overtake_share": round(config.overtake_share * 1000),
        "segment_ns": int((config.segment_ms or 1) * _MILLISECOND),
    }


def window_sizes(window: int, num_window_blocks: int, needed: int) -> dict[str, int]:
    """Return the fields of a geometry for layers with a window; none where num_window_blocks is 0.

    window: tokens that a query sees; needed: window blocks that one sequence takes at most.

    Raises:
        ConfigError: there are fewer.
    """
    if num_window_blocks == 0:
        return {}
    if num_window_blocks < needed:
        raise ConfigError(
            f"the KV cache of {num_window_blocks} window blocks is too small for one sequence, which takes {needed}: "
            "enlarge it with --kv-cache-memory-bytes or lower --max-num-batched-tokens"
        )
    entries = power_of_two(4 * num_window_blocks)
    return {"window": window, "num_window_blocks": num_window_blocks, "window_lru_entries": entries}


def pooling_sizes(pooling: Pooling | None, hidden_size: int) -> dict[str, int]:
    """Return the fields of a geometry for a model that pools; none where it generates."""
    if pooling is None:
        return {}
    task = Task.SCORE if pooling.scores else Task.EMBED
    return {"task": task, "vector_width": pooling.width(hidden_size), "normalizes_vectors": pooling.normalizes}


def _count_max_blocks(max_model_len: int, block_size: int, num_blocks: int) -> int:
    """Return the blocks of the longest sequence, once they are known to fit."""
    max_blocks = -(-max_model_len // block_size)
    if max_model_len < 2:
        raise ConfigError("--max-model-len must be at least 2: a prompt token and a generated one")
    if num_blocks < max_blocks:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks is too small for one sequence of {max_model_len} tokens "
            f"({max_blocks} blocks): enlarge it with --kv-cache-memory-bytes or lower --max-model-len"
        )
    return max_blocks
