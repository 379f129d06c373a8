// SPDX-License-Identifier: Apache-2.0
// How many tokens a step may take. Prompt tokens next to decoding sequences are cheap, but those wait for them.
#pragma once

#include "scheduler/cost.h"

namespace blink {

constexpr uint64_t kMostHeldUp = 8;           // times what decoding takes, for the sake of cheap prompt tokens
constexpr uint64_t kCheaper = 16;             // by more than one part of so many, to be worth a longer step
constexpr uint32_t kBurstSteps = 5;           // of the usual size: prompts that would take more are a burst
constexpr uint32_t kPatientSteps = 6;         // in which the prompts that wait should be computed
constexpr uint32_t kPatientUrgentSteps = 32;  // the same beside urgent sequences that have a target
constexpr uint32_t kPatientChunk = 4;         // prompt tokens that a step of a patient engine takes at least
constexpr uint64_t kStepsPerBurst = 128;      // of which one may take all that waits
constexpr uint64_t kBurstsAtOnce = 8;         // that may have been saved up

// Whether the step may take a burst of prompts as a whole, which is counted: so few do that gaps between tokens are as
// they were at the 99th percentile, and the tokens cost no more than in small steps. Runs on: one lane.
BLINK_FN bool take_burst(State& s) {
  const uint64_t due = most(s.burst_due, s.step);
  if (due > s.step + (kBurstsAtOnce - 1) * kStepsPerBurst) return false;
  s.burst_due = due + kStepsPerBurst;
  return true;
}

// Tokens of the largest mixed graph within a time, or of the smallest that holds `wanted` where that is larger.
BLINK_RARE_FN uint32_t fit_graph(const State& s, uint32_t wanted, uint64_t kv_tokens, uint64_t target) {
  const Geometry& g = s.geometry;
  uint32_t size = 0;
  for (uint32_t graph = g.num_decode_graphs; graph < g.first_scoring_graph; graph++)
    if (size < wanted || predict_ns(s, graph, kv_tokens) <= target) size = g.graphs[graph].tokens;
  return size;
}

// What a step takes whose prompt tokens hold decoding up the least, each by its part of what the step takes longer. Of
// weights that are read fast but multiplied no faster, as those of 4 bits, small steps with prompts are dear.
BLINK_RARE_FN uint64_t cheapest_ns(const State& s, uint32_t rows, uint64_t kv_tokens, uint64_t decoding) {
  const Geometry& g = s.geometry;
  uint64_t cheapest = 0, cheapest_extra = 1, cheapest_tokens = 0;
  for (uint32_t graph = g.num_decode_graphs; graph < g.first_scoring_graph; graph++) {
    const uint64_t took = predict_ns(s, graph, kv_tokens), extra = took > decoding ? took - decoding : 0;
    if (g.graphs[graph].tokens <= rows || took > kMostHeldUp * decoding) continue;
    const uint64_t tokens = g.graphs[graph].tokens - rows;
    if (extra * cheapest_tokens * (kCheaper + 1) <= cheapest_extra * tokens * kCheaper)
      cheapest = took, cheapest_extra = extra, cheapest_tokens = tokens;
  }
  return cheapest;
}

// What decoding takes that a step with prompts holds up: its own, or that of the step that it preempts.
BLINK_FN uint64_t held_up_ns(const State& s, uint32_t rows, uint64_t kv_tokens) {
  const uint64_t own = rows > 0 ? predict_decode_ns(s, rows, kv_tokens) : 0;
  return is_decode_preempted(s) ? most(own, s.segmented_cost_ns) : own;
}

// Tokens for a step in which `rows` sequences decode and read `kv_tokens`, while `waiting` prompt tokens are to be
// computed; `is_urgent` says that urgent ones decode. As many as keep the step at its target; where the prompts would
// take too many such steps, more, and now and then all. With nobody decoding: all. Runs on: one lane.
BLINK_RARE_FN uint32_t size_step(State& s, uint32_t rows, uint64_t kv_tokens, uint32_t waiting, bool is_urgent) {
  const Geometry& g = s.geometry;
  const uint64_t decoding = has_costs(s) ? held_up_ns(s, rows, kv_tokens) : 0;
  if (decoding == 0) return g.max_num_batched_tokens;
  const bool is_bound = is_urgent && g.urgent_tpot_target_ns > 0, is_patient = g.patient_steps != 0,
             has_bursts = g.step_target_ns == 0 && !is_patient;
  uint64_t target = g.step_target_ns;
  if (target == 0 && is_patient) target = decoding * 3 / 2;
  if (target == 0) target = most(decoding * 15 / 8, waiting > 0 ? cheapest_ns(s, rows, kv_tokens, decoding) : 0);
  if (is_bound) target = least(target, g.urgent_tpot_target_ns);
  const uint32_t least_chunk = is_patient ? kPatientChunk : uint32_t(g.block_size);
  const uint32_t usual = fit_graph(s, rows + least_chunk, kv_tokens, target);
  const bool is_burst = has_bursts && !is_bound && rows + ceil_div(waiting, kBurstSteps) > usual;
  const uint32_t usually = is_patient ? uint32_t(g.patient_steps) : kPatientSteps;
  const uint32_t patience = is_bound ? most(kPatientUrgentSteps, usually) : usually;
  const uint32_t share = is_burst && take_burst(s) ? waiting : ceil_div(waiting, patience);
  return fit_graph(s, rows + most(least_chunk, share), kv_tokens, target);  // prompts always get ahead
}

}  // namespace blink
