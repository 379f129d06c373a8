// SPDX-License-Identifier: Apache-2.0
// Who goes first. The order is total, so that every build takes the same decisions.
#pragma once

#include "scheduler/cost.h"

namespace blink {

// Lower is earlier: aged requests, then class, then priority; among equals the flow that has cost least so far (the
// virtual token counter of Sheng et al., Fairness in Serving Large Language Models, 2024), and in a flow the arrival.
struct Rank {
  uint64_t order;
  uint64_t computed;
  uint64_t arrival;
  uint32_t sequence;
};
BLINK_FN bool operator<(Rank a, Rank b) {
  if (a.order != b.order) return a.order < b.order;
  return a.computed != b.computed ? a.computed < b.computed : a.arrival < b.arrival;
}

constexpr Rank kLastRank{~0ull, ~0ull, ~0ull, kNone};  // behind every sequence
constexpr Rank kFirstRank{0, 0, 0, kNone};             // before every sequence

BLINK_FN uint32_t flow_index(const Sequence& q) { return q.queue_pair * kFlows + q.sqe.flow % kFlows; }
BLINK_FN Flow& flow_of(const State& s, const Sequence& q) { return s.flows[flow_index(q)]; }

// Time spent waiting, before and between runs.
BLINK_FN uint64_t waited_ns(const Sequence& q, uint64_t now) {
  return q.waited_ns + (q.status == SequenceStatus::kWaiting && now > q.queued_ns ? now - q.queued_ns : 0);
}

// Whether the other sequences of its flow have the flow's equal part of the places, or more, while there are others.
BLINK_FN bool has_its_places(const State& s, const Sequence& q) {
  const uint32_t others = flow_of(s, q).num_running - (q.status == SequenceStatus::kRunning);
  return s.num_flows > 1 && others >= most(1u, s.geometry.max_num_seqs / s.num_flows);
}

// Class after ageing: a request that has waited longer than the cap counts as latency-sensitive, until it ends. Not
// where its flow has its places: else all that a deep queue holds would be old, and go before a modest flow's requests.
BLINK_RARE_FN bool is_aged(const State& s, const Sequence& q, uint64_t now) {
  return waited_ns(q, now) > s.geometry.max_queue_age_ns && !has_its_places(s, q);
}
BLINK_FN bool is_best_effort(const State& s, const Sequence& q, uint64_t now) {
  return q.sqe.service_class == uint32_t(ServiceClass::kBestEffort) && !is_aged(s, q, now);
}

// Whether a sequence may take part in the step that is being composed.
BLINK_RARE_FN bool class_runs(const State& s, const Sequence& q, uint64_t now) {
  if (q.paused_tokens > 0) return false;
  return StepClass(s.step_class) == StepClass::kAll ||
         is_best_effort(s, q, now) == (StepClass(s.step_class) == StepClass::kBestEffort);
}

BLINK_RARE_FN Rank rank_of(const State& s, uint32_t index, uint64_t now) {
  const Sequence& q = s.sequences[index];
  const uint64_t priority = s.geometry.priority_policy ? uint32_t(q.sqe.priority) ^ 0x80000000u : 0;
  const uint64_t order = 1 + (uint64_t(q.sqe.service_class) << 33) + priority;
  return Rank{is_aged(s, q, now) ? 0 : order, flow_of(s, q).computed, q.arrival + 1, index};
}

// First in rank of `list` among those that `eligible` admits; sequence kNone if there is none.
template <class Env, class Eligible>
BLINK_FN Rank first_of(Env& env, const State& s, const uint32_t* list, uint32_t count, uint64_t now,
                       Eligible eligible) {
  Rank best = kLastRank;
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    if (eligible(s.sequences[list[i]])) best = least(best, rank_of(s, list[i], now));
  return env.least(best);
}

// Last in rank of `list` among those that `eligible` admits; sequence kNone if there is none.
template <class Env, class Eligible>
BLINK_FN Rank last_of(Env& env, const State& s, const uint32_t* list, uint32_t count, uint64_t now, Eligible eligible) {
  Rank worst = kFirstRank;
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    if (eligible(s.sequences[list[i]])) worst = most(worst, rank_of(s, list[i], now));
  return env.most(worst);
}

}  // namespace blink
