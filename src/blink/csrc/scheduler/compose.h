// SPDX-License-Identifier: Apache-2.0
// Writes the batch that admission chose: decode rows first, then chunks of prompts. Only called while no launch is in
// flight. A paused step has its own buffers (step_kind.h).
#pragma once

#include "scheduler/adapter_paging.h"
#include "scheduler/drafts.h"

namespace blink {

// How many completions each queue pair may need in this step, and whether that has room.
template <class Env>
BLINK_RARE_FN void open_queue_pairs(Env& env, State& s) {
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) s.qps[qp].cq_need = 0;
  env.sync();
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    env.fetch_add(s.qps[q.queue_pair].cq_need, completions_per_sample(s, q));
  }
  env.sync();
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    QueuePairState& q = s.qps[qp];
    const uint32_t need = q.cq_need;
    q.cq_need = 0;
    q.open = !q.closing && cq_room(s, q) >= need;
    if (q.open) q.cq_need = need;
  }
  env.sync();
}

// Write row `at`, whose first token is token `first` of the batch. Runs on: one lane.
BLINK_FN void write_row(const State& s, const StepBuffers& a, uint32_t at, uint32_t first, uint32_t index) {
  const Sequence& q = s.sequences[index];
  a.rows[at] = Row{q.row.kind, index, first, q.row.num_tokens, at, q.row.num_samples};
  a.row_slots[at] = int32_t(q.slot);
  a.query_starts[at] = int32_t(first);
  a.context_lens[at] = int32_t(q.num_computed + q.row.num_tokens);
  a.state_lags[at] = int32_t(q.state_lag);
}

BLINK_FN void write_token(const State& s, const StepBuffers& a, uint32_t at, const Sequence& q, uint32_t position) {
  const uint32_t size = s.geometry.block_size;
  a.input_ids[at] = s.tokens[uint64_t(q.slot) * s.geometry.max_model_len + position];
  a.positions[at] = int32_t(position);
  a.kv_slots[at] = block_table(s, q.slot)[position / size] * int32_t(size) + int32_t(position % size);
  if (has_windows(s))
    a.window_kv_slots[at] = window_table(s, q.slot)[position / size] * int32_t(size) + int32_t(position % size);
}

// Write the batch's rows of a sequence that decodes: of its newest token, and of each draft behind it.
BLINK_FN void write_decode_row(const State& s, const StepBuffers& a, uint32_t at, uint32_t index) {
  const Sequence& q = s.sequences[index];
  write_row(s, a, at, at, index);
  for (uint32_t i = 0; i < q.row.num_tokens; i++) {
    if (i > 0) write_row(s, a, at + i, at + i, index);
    if (i > 0) a.rows[at + i] = Row{RowKind::kNone, index, at + i, 0, at + i, 0};
    a.context_lens[at + i] = int32_t(q.num_computed + 1 + i);
    if (i > 0) a.state_lags[at + i] = 0;
    write_token(s, a, at + i, q, q.num_computed + i);
  }
}

// Let a sequence grow by one of the free blocks, the last but `rank`, which stays in the list.
template <class Pool>
BLINK_FN void take_free(State& s, const Sequence& q, uint32_t rank) {
  const uint32_t block = Pool::free(s)[Pool::counts(s).num_free - 1 - rank];
  Pool::table(s, q.slot)[q.num_blocks] = int32_t(block);
  Pool::refs(s)[block] = 1;
}

// Write the decode rows, each with the blocks that it may need. Returns their number.
template <class Env>
BLINK_RARE_FN uint32_t write_decode_rows(Env& env, State& s, const StepBuffers& a, uint32_t needed_blocks) {
  keep_free(env, s, needed_blocks);
  const uint32_t num_free = has_windows(s) ? least(s.num_free_blocks, s.num_free_window_blocks) : s.num_free_blocks;
  uint32_t rows = 0, taken = 0;
  for (uint32_t tile = 0; tile < s.num_running; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    const uint32_t index = i < s.num_running ? s.running[i] : 0;
    Sequence& q = s.sequences[index];
    const bool active = i < s.num_running && decodes(q.row);
    const uint32_t growth = active ? missing_blocks(s, q, q.num_computed + q.row.num_tokens) : 0;
    uint32_t num_active = 0, num_grown = 0;
    const uint32_t row = rows + env.scan(active ? q.row.num_tokens : 0, num_active);
    const uint32_t block_rank = taken + env.scan(growth, num_grown);
    for (uint32_t rank = block_rank; rank < block_rank + growth && rank < num_free; rank++) {
      take_free<FullPool>(s, q, rank);
      if (has_windows(s)) take_free<WindowPool>(s, q, rank);
      q.num_blocks++;
    }
    if (growth > 0 && block_rank + growth > num_free) fail(s, ErrorCode::kFreeListCorrupt, BLINK_HERE, block_rank);
    if (active) write_decode_row(s, a, row, index);
    rows += num_active;
    taken += num_grown;
  }
  env.sync();
  if (env.lane() == 0) {
    s.num_free_blocks -= least(taken, num_free);
    if (has_windows(s)) s.num_free_window_blocks -= least(taken, num_free);
  }
  env.sync();
  return rows;
}

// Write the chunks of prompts behind the decode rows; the batch grows by them.
template <class Env>
BLINK_RARE_FN void write_prefill_rows(Env& env, State& s, const StepBuffers& a, BatchHeader& batch) {
  const uint32_t chunks = compact(env, s.running, s.num_running, s.scratch,
                                  [&](uint32_t i) { return s.sequences[i].row.kind == RowKind::kPrefill; });
  for (uint32_t n = 0; n < chunks; n++) {
    const uint32_t index = s.scratch[n], first = batch.num_tokens;
    const Sequence& q = s.sequences[index];
    if (env.lane() == 0) write_row(s, a, batch.num_rows, first, index);
    for (uint32_t i = env.lane(); i < q.row.num_tokens; i += env.lanes())
      write_token(s, a, first + i, q, q.num_computed + i);
    batch.num_rows++;
    batch.num_tokens += q.row.num_tokens;
  }
}

// Make the rest of the bucket harmless: tokens that write no KV, rows without context.
template <class Env>
BLINK_RARE_FN void write_padding(Env& env, const State& s, const StepBuffers& a, const BatchHeader& b) {
  const auto [tokens, rows] = s.geometry.graphs[b.graph];
  for (uint32_t i = b.num_tokens + env.lane(); i < tokens; i += env.lanes()) {
    a.input_ids[i] = 0;
    a.positions[i] = 0;
    a.kv_slots[i] = -1;
    if (has_windows(s)) a.window_kv_slots[i] = -1;
  }
  for (uint32_t row = b.num_rows + env.lane(); row < rows; row += env.lanes()) {
    a.row_slots[row] = a.state_sources[row] = a.state_targets[row] = a.state_lags[row] = 0;
    a.context_lens[row] = 0;
  }
  for (uint32_t row = b.num_rows + env.lane(); row <= rows; row += env.lanes())
    a.query_starts[row] = int32_t(b.num_tokens);
}

// The smallest graph that holds a step.
BLINK_FN uint32_t choose_graph(const Geometry& g, const StepTotals& total) {
  const uint32_t graph = graph_for(g, total.tokens,
                                   total.logprob_rows > 0   ? GraphKind::kScoring
                                   : total.prefill_rows > 0 ? GraphKind::kMixed
                                                            : GraphKind::kDecoding);
  return total.larger_rows > 0 ? larger_graph(g, graph) : graph;
}

// Whether prefill may preempt a step: a decode step, while a prompt is expected and the credit pays its cost.
BLINK_FN bool may_be_preempted(const State& s, uint32_t graph, const StepTotals& total) {
  return is_decode_graph(s.geometry, graph) && s.step < s.preemption_until &&
         preemption_cost(predict_ns(s, graph, total.context), total.decode_rows) <= s.preemption_credit_ns;
}

// Whether a step is launched in segments: one that others may pass, whose graph is long enough to be cut. No graph of
// prompt logprobs is, and no step that verifies drafts, whatever its graph.
BLINK_FN bool takes_segments(const State& s, uint32_t graph, const StepTotals& total) {
  if (has_siblings(s)) return false;
  const bool may_be_passed = total.best_effort_rows > 0 || may_be_preempted(s, graph, total);
  return may_be_passed && !is_scoring(s.geometry, graph) && s.costs[graph].num_segments > 1 && !is_segmented(s);
}

// Whether a step may verify drafts: one that only decodes, as a whole.
BLINK_FN bool takes_drafts(const State& s, const StepTotals& total) {
  const bool only_decodes = total.tokens > 0 && total.prefill_rows + total.logprob_rows == 0;
  return speculates(s) && only_decodes && !s.failed && !takes_segments(s, choose_graph(s.geometry, total), total);
}

// Let the step that was just composed be the one that is launched in segments.
template <class Env>
BLINK_RARE_FN void open_segments(Env& env, State& s, const BatchHeader& batch) {
  for (uint32_t row = env.lane(); row < batch.num_rows; row += env.lanes()) {
    Sequence& q = s.sequences[s.segmented.rows[row].sequence];
    q.paused_tokens = q.row.num_tokens;
    q.row = Row{};
  }
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    s.qps[qp].cq_held = s.qps[qp].cq_need;
    s.qps[qp].cq_need = 0;
  }
  if (env.lane() == 0) {
    s.segment = 0;
    s.num_segments = s.costs[batch.graph].num_segments;
    s.segmented_ns = 0;
    s.segmented_cost_ns = s.account.predicted_ns;
    s.segmented_class = StepClass(s.step_class);
    s.segmented_best_effort_rows = s.account.num_best_effort_rows;
    s.account.predicted_ns /= s.num_segments;
  }
  env.sync();
}

// Begin the account of a composed step. Runs on: one lane.
BLINK_FN void open_account(State& s, uint32_t graph, const StepTotals& total, bool segmented) {
  Account& a = s.account;
  if (is_decode_preempted(s)) {  // its rows would have taken part
    const uint64_t cost = preemption_cost(s.segmented_cost_ns, s.segmented.header->num_rows);
    s.preemption_credit_ns -= least(s.preemption_credit_ns, cost);
  }
  a.kv_tokens = total.context;
  a.predicted_ns = predict_ns(s, graph, a.kv_tokens);
  a.graph = graph;
  a.num_best_effort_rows = total.best_effort_rows;
  a.step_class = StepClass(s.step_class);
  a.segmented = segmented;
}

// Plan the next step and write its batch. Returns the number of rows; 0 if there is nothing to do.
template <class Env>
BLINK_RARE_FN uint32_t compose(Env& env, State& s, StepClass step_class, uint64_t now) {
  env.sync();
  if (env.lane() == 0) {
    close_account(s);
    s.pass++;
    s.step_class = uint32_t(step_class);
    s.step_admitted = s.step_preempted = s.automaton_bytes_copied = 0;
  }
  open_queue_pairs(env, s);
  page_adapters(env, s, now);
  StepTotals total = choose_prompts(env, s, choose_decoders(env, s, now), now);
  if (takes_drafts(s, total)) total = choose_drafts(env, s, total);
  raise_floor(env, s);
  if (s.failed || total.tokens == 0) return 0;
  if (env.lane() == 0) s.step++;
  env.sync();
  const uint32_t graph = choose_graph(s.geometry, total);
  const bool segmented = takes_segments(s, graph, total);
  const StepKind kind = segmented ? StepKind::kSegmented : StepKind::kWhole;
  const StepBuffers& a = buffers_of(s, kind);
  const uint32_t decode_rows = write_decode_rows(env, s, a, total.blocks);
  BatchHeader batch{decode_rows, decode_rows, decode_rows, graph, s.step, 0, 0};
  if (total.prefill_rows > 0) write_prefill_rows(env, s, a, batch);
  write_padding(env, s, a, batch);
  env.sync();
  write_snapshots(env, s, a, batch.num_rows);
  if (env.lane() == 0) {
    *a.header = batch;
    s.in_flight_kind = uint32_t(kind);
    open_account(s, graph, total, segmented);
  }
  env.sync();
  if (segmented) open_segments(env, s, batch);
  return s.failed ? 0 : batch.num_rows;
}

}  // namespace blink
