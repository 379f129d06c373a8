# SPDX-License-Identifier: Apache-2.0
"""What steps take, measured at boot for the scheduler's cost table (csrc/scheduler/cost.h), which corrects itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from blink.engine.geometry import graph_sizes, list_graphs
from blink.kernels.batch import Batch, Header, Param
from blink.region.layout import GRAPH_COST

_MAX_SEGMENTS = 64
_LONG_CONTEXT = 1024  # tokens of a row's context, for the cost of reading the KV cache
_USUAL_CONTEXT = 512  # with which steps are cut into segments of equal time
_LAYERS_OF_HEAD = 2  # that take about as long as the output matrix and sampling
_FAR = 16  # tokens by which a graph is larger that is measured beyond the budget
_SLACK = 1.5  # segments: a step is cut that takes longer than this
TimeStep = Callable[[int], float]  # seconds that a step of this graph takes, as the batch describes it


def measure_costs(
    geometry: np.ndarray[Any, Any], batch: Batch, time_step: TimeStep, *, num_layers: int, budget: float
) -> np.ndarray[Any, Any]:
    """Return the cost of each graph (dtype layout.GRAPH_COST) from steps of made-up rows; the batch is empty after it.

    budget: seconds for each kind of graph; of those that are not measured by then one is, and others lie on its line.
    """
    graphs, num_decode = list_graphs(geometry), int(geometry["num_decode_graphs"])
    sizes, first_scoring = graph_sizes(geometry), int(geometry["first_scoring_graph"])

    def run(index: int, context: int = 0) -> float:
        describe_step(batch, geometry, *sizes[index], decoding=graphs[index].bucket.decoding, context=context)
        found = time_step(index)
        return found if found > budget / 2 else min(found, time_step(index))  # what else the machine does is no cost

    run(0)  # whatever is slow the first time
    num_plain, seconds = int(geometry["num_plain_graphs"]), list[float]()
    for start in range(0, len(sizes), num_plain):
        points: list[tuple[int, float]] = []
        kind = _measure_kind(range(start, start + num_decode), sizes, run, budget, points)
        kind += _measure_kind(range(start + num_decode, start + first_scoring), sizes, run, budget, points)
        # What scoring adds, the scheduler learns.
        seconds += kind + kind[num_decode : num_decode + num_plain - first_scoring]
    most = next((i for i in reversed(range(num_decode)) if seconds[i] < budget), 0)
    context = min(_LONG_CONTEXT, int(geometry["max_model_len"]) - 1)
    kv_seconds = max(0.0, run(most, context) - seconds[most]) / (sizes[most][1] * context)
    clear_step(batch)
    costs = np.zeros(len(sizes), GRAPH_COST)
    costs["base_ns"] = np.maximum(np.asarray(seconds) * 1e9, 1000)
    costs["kv_ps"] = min(int(kv_seconds * 1e12), 2**32 - 1)
    rows = np.asarray([rows for _, rows in sizes])
    usual = np.asarray(seconds) + kv_seconds * rows * min(_USUAL_CONTEXT, context)
    parts = usual * 1e9 / float(geometry["segment_ns"])
    costs["num_segments"] = np.where(parts > _SLACK, np.clip(np.ceil(parts), 1, min(num_layers, _MAX_SEGMENTS)), 1)
    costs["num_segments"][[graph.runs_whole for graph in graphs]] = 1
    return costs


def describe_costs(geometry: np.ndarray[Any, Any], costs: np.ndarray[Any, Any]) -> str:
    """Say what steps of the least and the most tokens take, and in how many segments they may run."""
    sizes, milliseconds = graph_sizes(geometry), costs["base_ns"] / 1e6
    last = int(geometry["first_scoring_graph"]) - 1
    least, most = f"{milliseconds[0]:.1f} ms for {sizes[0][1]} row", f"{milliseconds[last]:.1f} ms for {sizes[last][0]}"
    return f"{least}, {most} tokens; best-effort steps run in up to {max(costs['num_segments'])} segments"


def first_layer(segment: int, num_segments: int, num_layers: int) -> int:
    """Return where a segment begins: the last has the head to compute as well, and fewer layers for it."""
    even = segment * (num_layers + _LAYERS_OF_HEAD) // num_segments
    return num_layers if segment == num_segments else min(even, num_layers - num_segments + segment)


def _measure_kind(
    graphs: range, sizes: Sequence[tuple[int, int]], run: TimeStep, budget: float, points: list[tuple[int, float]]
) -> list[float]:
    """Time graphs, ascending in size, while the budget lasts, then a larger one; others lie on lines through `points`.

    points: tokens and seconds of what was measured; those of these graphs are added.
    """
    first, spent, least = len(points), 0.0, 0
    for index in graphs:
        tokens = sizes[index][0]
        if tokens < least:
            continue
        points.append((tokens, run(index)))
        spent += points[-1][1]
        if spent >= budget:
            if least > 0:
                break
            least = tokens + _FAR
    known, slope = np.asarray(points[first:]), _slope(points)
    wanted = np.asarray([sizes[index][0] for index in graphs])
    beyond = np.maximum(wanted - known[-1, 0], 0)
    return np.maximum.accumulate(np.interp(wanted, known[:, 0], known[:, 1]) + beyond * slope).tolist()


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds of one more token, from the last two points of different sizes."""
    tokens, seconds = points[-1]
    other = next((point for point in reversed(points) if point[0] != tokens), None)
    return max(0.0, (seconds - other[1]) / (tokens - other[0])) if other else 0.0


def describe_step(
    batch: Batch, geometry: np.ndarray[Any, Any], tokens: int, rows: int, *, decoding: bool, context: int
) -> None:
    """Fill a graph: decoding rows behind `context` tokens each, or as few prompts as hold all its tokens."""
    longest, num_slots = int(geometry["max_model_len"]), int(geometry["num_slots"])
    rows = rows if decoding else -(-tokens // longest)
    clear_step(batch)
    row = torch.arange(tokens) * rows // tokens
    starts = torch.searchsorted(row, torch.arange(rows + 1))
    positions = torch.arange(tokens) - starts[row] + context
    slots = min(rows, num_slots)  # a slot may have several rows
    tables = torch.arange(slots * int(geometry["max_blocks"])).view(slots, -1)
    chance = torch.Generator().manual_seed(0)
    batch.input_ids[:tokens] = _like(
        torch.randint(int(geometry["vocab_size"]), (tokens,), generator=chance), batch.input_ids
    )
    for target, values in (
        (batch.positions, positions),
        (batch.query_starts, starts),
        (batch.context_lens, starts.diff() + context),
        (batch.row_slots, torch.arange(rows) % slots),
    ):
        target[: len(values)] = _like(values, target)
    batch.query_starts[rows:] = tokens
    batch.kv_slots[:tokens] = -1  # nothing is left in the cache
    batch.block_tables[:slots] = _like(tables % int(geometry["num_blocks"]), batch.block_tables)
    if batch.has_windows:
        batch.window_kv_slots[:tokens] = -1
        batch.window_tables[:slots] = _like(tables % int(geometry["num_window_blocks"]), batch.window_tables)
    batch.params_f32[:slots, Param.TOP_P] = batch.params_f32[:slots, Param.REPETITION_PENALTY] = 1.0
    batch.params[:slots, Param.NUM_LOGPROBS] = -1
    counts = {Header.NUM_ROWS: rows, Header.NUM_TOKENS: tokens, Header.NUM_DECODE_ROWS: rows if decoding else 0}
    for word, value in counts.items():
        batch.header[word] = value


def clear_step(batch: Batch) -> None:
    """Leave no row behind."""
    for part in (batch.header, batch.input_ids, batch.positions, batch.kv_slots, batch.query_starts):
        part.zero_()
    for part in (batch.context_lens, batch.row_slots, batch.block_tables, batch.params, batch.sampled_tokens):
        part.zero_()
    for part in (batch.window_kv_slots, batch.window_tables):
        part.zero_()


def _like(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return values.to(device=target.device, dtype=target.dtype)
