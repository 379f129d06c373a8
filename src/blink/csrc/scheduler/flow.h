// SPDX-License-Identifier: Apache-2.0
// Fairness among flows: the counters that rank them (policy.h), and their shares of a step's prompt tokens.
//
// A flow costs what is computed for it: tokens of prompts that the prefix cache did not hold, and generated ones. One
// that comes back, or whose queue pair was not read, starts where the least served one stands: idleness earns nothing.
#pragma once

#include "scheduler/policy.h"
#include "scheduler/queue_pair.h"

namespace blink {

// Runs on: one lane.
BLINK_FN void join_flow(State& s, const Sequence& q) {
  Flow& flow = flow_of(s, q);
  if (flow.num_live++ > 0) return;
  flow.computed = most(flow.computed, s.flow_floor);
  s.num_flows++;
}

// Charge the sequences that decode in this step; prompts are charged as they are chosen.
template <class Env>
BLINK_RARE_FN void charge_decoders(Env& env, State& s) {
  for (uint32_t tile = 0; tile < s.num_running; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    Sequence& q = s.sequences[s.running[i < s.num_running ? i : 0]];
    Flow& flow = flow_of(s, q);
    const bool is_charged = i < s.num_running && q.row.kind == RowKind::kDecode;
    const bool first = is_charged && env.fetch_add(flow.pending, take_charge(q)) == 0;
    env.sync();
    if (first) {
      flow.computed += flow.pending;
      flow.pending = 0;
    }
    env.sync();
  }
}

// Let the floor rise to the least counter that this step serves, and flows that wait for their own frontend with it.
template <class Env>
BLINK_RARE_FN void raise_floor(Env& env, State& s) {
  uint64_t served = ~0ull;
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    if (takes_part(q)) served = least(served, flow_of(s, q).computed);
  }
  served = env.least(served);
  if (served != ~0ull && env.lane() == 0) s.flow_floor = most(s.flow_floor, served);
  env.sync();
  for (uint32_t qp = 0; qp < s.geometry.num_queue_pairs; qp++) {
    if (!is_blocked(s, s.qps[qp])) continue;
    for (uint32_t i = env.lane(); i < kFlows; i += env.lanes()) {
      Flow& flow = s.flows[qp * kFlows + i];
      flow.computed = most(flow.computed, s.flow_floor);
    }
  }
  env.sync();
}

// Divide the tokens that decoding leaves of a step among the flows whose prompts wait; `waits` tells those sequences.
template <class Env, class Waits>
BLINK_FN void share_prompt_tokens(Env& env, State& s, uint32_t taken, Waits waits) {
  const uint32_t count = s.num_running + s.num_waiting;
  const auto sequence_at = [&](uint32_t i) -> const Sequence& {
    return s.sequences[i < s.num_running ? s.running[i] : s.waiting[i - s.num_running]];
  };
  uint32_t flows = 0;
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    if (waits(sequence_at(i))) flows += env.fetch_add(flow_of(s, sequence_at(i)).pending, 1) == 0;
  flows = env.sum(flows);
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    if (waits(sequence_at(i))) env.fetch_add(flow_of(s, sequence_at(i)).pending, kNone);
  const uint32_t left = s.step_tokens - least(taken, s.step_tokens);
  if (env.lane() == 0) s.prompt_share = flows > 1 ? most(s.geometry.block_size, left / flows) : kNone;
  env.sync();
}

}  // namespace blink
