// SPDX-License-Identifier: Apache-2.0
// How many tokens a step may take. Prompt tokens beside decoding sequences are cheap, but those wait for them.
#pragma once

#include "scheduler/cost.h"

namespace blink {

constexpr uint32_t kPatientSteps = 6;         // in which the prompts that wait should be computed
constexpr uint32_t kPatientUrgentSteps = 32;  // the same beside urgent sequences that have a target

// Tokens for a step in which `rows` sequences decode and read `kv_tokens`, while `waiting` prompt tokens are to be
// computed; `is_urgent` says that urgent ones decode. As many as keep the step at its target; more where the prompts
// would take too many such steps. With nobody decoding: all.
BLINK_RARE_FN uint32_t size_step(const State& s, uint32_t rows, uint64_t kv_tokens, uint32_t waiting, bool is_urgent) {
  const Geometry& g = s.geometry;
  if (!has_costs(s) || rows == 0) return g.max_num_batched_tokens;
  const bool is_bound = is_urgent && g.urgent_tpot_target_ns > 0;
  uint64_t target = g.step_target_ns > 0 ? g.step_target_ns : 2 * predict_decode_ns(s, rows, kv_tokens);
  if (is_bound) target = least(target, g.urgent_tpot_target_ns);
  const uint32_t share = ceil_div(waiting, is_bound ? kPatientUrgentSteps : kPatientSteps);
  const uint32_t wanted = rows + most(g.block_size, share);  // prompts always get ahead
  uint32_t size = 0;
  for (uint32_t graph = g.num_decode_graphs; graph < g.first_scoring_graph; graph++)
    if (size < wanted || predict_ns(s, graph, kv_tokens) <= target) size = g.graphs[graph].tokens;
  return size;
}

}  // namespace blink
