// SPDX-License-Identifier: Apache-2.0
// Predicts how long a step takes, from a table that the engine measures at boot. Each step's end corrects the table by
// an eighth of the error. A correction fades while its graph does not run: a cost that is too high keeps its graph from
// running, and so from being corrected. All of it is integers, so that equal times lead to equal decisions on every
// build.
//
// Two times enter: `now` of a pass, and the time from a launch to the pass that saw its end. The trace holds both of
// every launch, so decisions can be replayed from it.
#pragma once

#include "scheduler/step_kind.h"

namespace blink {

constexpr int64_t kLearning = 8;  // part of an error by which a cost moves
constexpr int64_t kUnit = 1024;   // of errors: an expected time
constexpr uint64_t kLeastCost = 1000;
constexpr uint64_t kHalfLife = 1024;  // steps without a graph in which half of its correction fades

BLINK_FN bool has_costs(const State& s) { return s.costs[0].num_segments > 0; }

// A graph's cost now: as it was corrected last, or closer to what was measured.
BLINK_FN GraphCost faded_cost(const State& s, uint32_t graph) {
  GraphCost cost = s.costs[graph];
  const MeasuredCost& measured = s.measured_costs[graph];
  const uint64_t halvings = measured.is_known ? least((s.step - measured.learned_step) / kHalfLife, uint64_t(63)) : 0;
  if (halvings == 0) return cost;
  const auto fade = [&](int64_t from, int64_t to) { return to + ((from - to) >> halvings); };
  cost.base_ns = uint64_t(fade(int64_t(cost.base_ns), int64_t(measured.base_ns)));
  cost.kv_ps = uint32_t(fade(cost.kv_ps, measured.kv_ps));
  return cost;
}

// What a step of one graph takes that reads so many tokens of the KV cache.
BLINK_RARE_FN uint64_t predict_ns(const State& s, uint32_t graph, uint64_t kv_tokens) {
  const GraphCost cost = faded_cost(s, graph);
  return cost.base_ns + kv_tokens * cost.kv_ps / 1000;
}

// What a graph computes: rows of one token alone; any rows; any rows and the logprobs of their prompts.
enum class GraphKind { kDecoding, kMixed, kScoring };

// The plain graph (Geometry::num_plain_graphs) of the same kind and size.
BLINK_FN uint32_t plain_graph(const Geometry& g, uint32_t graph) {
  return graph < g.num_plain_graphs ? graph : graph - g.num_plain_graphs;
}

// The graph of the same kind and size for steps that do more (StepTotals::larger_rows); the same where an engine
// captures none, and looks at each step's rows instead.
BLINK_FN uint32_t larger_graph(const Geometry& g, uint32_t graph) {
  return g.num_plain_graphs < g.num_graphs ? graph + g.num_plain_graphs : graph;
}

BLINK_FN bool is_decode_graph(const Geometry& g, uint32_t graph) { return plain_graph(g, graph) < g.num_decode_graphs; }
BLINK_FN bool is_scoring(const Geometry& g, uint32_t graph) { return plain_graph(g, graph) >= g.first_scoring_graph; }

// Index of the smallest plain graph of a kind for so many tokens.
BLINK_RARE_FN uint32_t graph_for(const Geometry& g, uint32_t tokens, GraphKind kind) {
  const uint32_t ends[] = {0, g.num_decode_graphs, g.first_scoring_graph, g.num_plain_graphs};
  uint32_t graph = ends[uint32_t(kind)];
  while (graph + 1 < ends[uint32_t(kind) + 1] && g.graphs[graph].tokens < tokens) graph++;
  return graph;
}

BLINK_FN uint64_t predict_decode_ns(const State& s, uint32_t rows, uint64_t kv_tokens) {
  return predict_ns(s, graph_for(s.geometry, rows, GraphKind::kDecoding), kv_tokens);
}

// Correct a graph's cost by what one of its steps took. No error counts for more than was expected: it may be a pause
// of the machine.
BLINK_RARE_FN void learn(State& s, uint32_t graph, uint64_t predicted, uint64_t spent) {
  GraphCost& cost = s.costs[graph];
  MeasuredCost& measured = s.measured_costs[graph];
  if (!measured.is_known) measured = {cost.base_ns, 0, cost.kv_ps, 1};
  cost = faded_cost(s, graph);
  measured.learned_step = s.step;
  const int64_t expected = int64_t(most(predicted, kLeastCost));
  const int64_t error = least((int64_t(spent) - expected) * kUnit / expected, kUnit);
  const auto corrected = [&](int64_t value) { return value + value * error / (kUnit * kLearning); };
  cost.base_ns = most(uint64_t(corrected(int64_t(cost.base_ns))), kLeastCost);
  cost.kv_ps = uint32_t(least(corrected(cost.kv_ps), int64_t(0xffffffff)));
}

// Move the best-effort credit: the class earns its share of the time in which it did not run, and pays the others'
// share of its own. Neither debt nor credit may outlast a few of its segments by much.
BLINK_FN void share_time(State& s, bool was_best_effort, uint64_t spent) {
  const Geometry& g = s.geometry;
  const int64_t share = g.best_effort_share, unit = int64_t(g.segment_ns), time = int64_t(spent);
  s.best_effort_credit_ns += was_best_effort ? -time * (1000 - share) / 1000 : time * share / 1000;
  s.best_effort_credit_ns = least(most(s.best_effort_credit_ns, -16 * unit), 64 * unit);
}

constexpr uint64_t kPreemptionLaunches = 4096;  // behind one that held up a prompt, in which more prompts are expected
constexpr uint64_t kMaxPreemptionCredit = 32;   // segments' time that prompts may have saved up

constexpr uint64_t kCheapRows = 32;  // a preemption of these costs no more than of one

// Cost of preempting a decode step: its predicted time, scaled up above 32 rows.
BLINK_FN uint64_t preemption_cost(uint64_t cost_ns, uint32_t rows) {
  return cost_ns * most(uint64_t(rows), kCheapRows) / kCheapRows;
}

// Whether a prompt waits only for the end of a decode step, which it could have preempted.
BLINK_FN bool is_held_up(const State& s) {
  return is_decode_graph(s.geometry, s.account.graph) && s.num_waiting > 0 && s.num_running < s.geometry.max_num_seqs;
}

// Prompts earn their share of the time.
BLINK_FN void earn_preemption_credit(State& s, uint64_t spent) {
  const Geometry& g = s.geometry;
  s.preemption_credit_ns =
      least(s.preemption_credit_ns + spent * g.overtake_share / 1000, kMaxPreemptionCredit * g.segment_ns);
}

// Note that the launch in flight is over, before its sequences end. Runs on: one lane.
BLINK_FN void end_account(State& s, uint64_t now) {
  if (is_held_up(s)) s.preemption_until = s.step + kPreemptionLaunches;
  Account& a = s.account;
  a.spent_ns = most(uint64_t(1), now > s.launched_ns ? now - s.launched_ns : 0);
  if (a.segmented) s.segmented_ns += a.spent_ns;
}

// Take over what the launch that is over took, once. Runs on: one lane.
BLINK_RARE_FN void close_account(State& s) {
  Account& a = s.account;
  if (a.spent_ns == 0) return;
  if (has_costs(s) && !a.segmented) learn(s, a.graph, a.predicted_ns, a.spent_ns);
  if (s.num_best_effort > 0) share_time(s, a.num_best_effort_rows > 0, a.spent_ns);
  earn_preemption_credit(s, a.spent_ns);
  a.spent_ns = 0;
}

}  // namespace blink
