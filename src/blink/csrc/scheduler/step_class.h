// SPDX-License-Identifier: Apache-2.0
// Which class runs next: urgent sequences, best-effort sequences, or all. Urgent work passes best-effort work at the
// end of a step or of a segment. Best-effort work still gets its share of the time. docs/scheduling.md has the reasons.
//
// Urgent sequences are latency-sensitive, or have aged (policy.h).
#pragma once

#include "scheduler/admission.h"

namespace blink {

// What could run now, beside the step that is paused.
struct RunnableWork {
  uint32_t urgent_prompts, urgent_rows, best_effort_prompts, best_effort_rows;
  uint64_t urgent_kv, kv;  // tokens of the KV cache that decoding would read
};
BLINK_FN RunnableWork operator+(RunnableWork a, RunnableWork b) {
  return {a.urgent_prompts + b.urgent_prompts,
          a.urgent_rows + b.urgent_rows,
          a.best_effort_prompts + b.best_effort_prompts,
          a.best_effort_rows + b.best_effort_rows,
          a.urgent_kv + b.urgent_kv,
          a.kv + b.kv};
}

BLINK_FN void add_runnable(const State& s, const Sequence& q, uint64_t now, RunnableWork& d) {
  if (q.paused_tokens > 0 || q.cancelled || s.qps[q.queue_pair].closing) return;
  if (q.status == SequenceStatus::kWaiting && !(can_start(s, q) && has_automaton_room(s, q))) return;
  const bool urgent = !is_best_effort(s, q, now);
  if (q.status == SequenceStatus::kWaiting || !is_decoding(q)) {
    (urgent ? d.urgent_prompts : d.best_effort_prompts)++;
    return;
  }
  (urgent ? d.urgent_rows : d.best_effort_rows)++;
  d.kv += q.num_tokens;
  if (urgent) d.urgent_kv += q.num_tokens;
}

template <class Env>
BLINK_RARE_FN RunnableWork count_runnable(Env& env, const State& s, uint64_t now) {
  RunnableWork d{};
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) add_runnable(s, s.sequences[s.running[i]], now, d);
  for (uint32_t i = env.lane(); i < s.num_waiting; i += env.lanes()) add_runnable(s, s.sequences[s.waiting[i]], now, d);
  return env.sum(d);
}

// What best-effort work takes until its next border: as the segments before it did, or as expected.
BLINK_FN uint64_t quantum_ns(const State& s, const RunnableWork& d) {
  if (is_segmented(s)) return s.segment > 0 ? s.segmented_ns / s.segment : s.segmented_cost_ns / s.num_segments;
  const uint32_t graph = graph_for(s.geometry, d.best_effort_rows, GraphKind::kDecoding);
  return predict_ns(s, graph, d.kv - d.urgent_kv) / most(1u, s.costs[graph].num_segments);
}

// Whether best-effort work may run before the next token of urgent sequences is due.
BLINK_FN bool has_time_left(const State& s, const RunnableWork& d, uint64_t now) {
  const uint64_t target = s.geometry.urgent_tpot_target_ns;
  const uint64_t due = s.urgent_ns + target - target / 16;  // the table is not exact
  return now + quantum_ns(s, d) + predict_decode_ns(s, d.urgent_rows, d.urgent_kv) <= due;
}

// Whether all that decode may share a step, as far as the urgent ones' target goes.
BLINK_FN bool fits_target(const State& s, const RunnableWork& d) {
  return predict_decode_ns(s, d.urgent_rows + d.best_effort_rows, d.kv) <= s.geometry.urgent_tpot_target_ns;
}

// Whether prefill may preempt the paused decode step: half of it must be left, and the less is left, the more credit
// it takes.
BLINK_FN bool can_preempt_decode(const State& s) {
  const uint32_t left = s.num_segments - s.segment;
  const uint64_t cost = preemption_cost(s.segmented_cost_ns, s.segmented.header->num_rows);
  return 2 * left >= s.num_segments && cost * s.num_segments <= s.preemption_credit_ns * left;
}

// What to launch next: a step of these sequences, or what is left of the one that is paused.
struct Choice {
  StepClass step_class;
  bool resumes;
};

// Every lane gets the same answer.
template <class Env>
BLINK_FN Choice choose_class(Env& env, State& s, uint64_t now) {
  const bool open = is_segmented(s);
  const Choice best_effort{StepClass::kBestEffort, open}, all{StepClass::kAll, open}, urgent{StepClass::kUrgent, false};
  if (!has_costs(s) || (s.num_best_effort == 0 && !open)) return all;
  if (env.lane() == 0) close_account(s);
  const RunnableWork d = count_runnable(env, s, now);  // synchronises
  if (d.urgent_prompts + d.urgent_rows == 0) return all;
  if (!open && d.best_effort_prompts + d.best_effort_rows == 0) return all;
  if (is_decode_preempted(s)) return d.urgent_prompts > 0 && can_preempt_decode(s) ? urgent : all;
  if (s.best_effort_credit_ns > int64_t(s.geometry.segment_ns)) return best_effort;
  if (d.urgent_prompts > 0) return urgent;
  if (s.geometry.urgent_tpot_target_ns == 0) return all;
  if (!open && fits_target(s, d)) return all;
  return has_time_left(s, d, now) ? best_effort : urgent;
}

}  // namespace blink
