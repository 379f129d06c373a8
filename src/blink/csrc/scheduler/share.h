// SPDX-License-Identifier: Apache-2.0
// How queue pairs share the slots. A slot cannot be taken back: it holds the only copy of its request.
//
// Each attached queue pair has a reserve that the others leave alone: its part of half the slots. As half of them are
// as many as may run, one busy queue pair still fills the batch by itself. Beyond its reserve it takes no more than an
// equal share of all while another one asks.
#pragma once

#include "scheduler/queue_pair.h"

namespace blink {

// Whether a waiting sequence may start, as far as its queue pair goes.
BLINK_FN bool can_start(const State& s, const Sequence& q) {
  const QueuePairState& pair = s.qps[q.queue_pair];
  return !q.cancelled && !pair.closing && cq_room(s, pair) > completions_per_sample(s, q);
}

BLINK_FN uint32_t slot_reserve(const State& s) { return most(1u, s.geometry.num_slots / 2 / s.num_attached); }
BLINK_FN uint32_t slot_share(const State& s) { return most(1u, s.geometry.num_slots / s.num_attached); }

// Free slots that are kept for a queue pair.
BLINK_FN uint32_t kept_slots(const State& s, const QueuePairState& q) {
  return q.attached && q.num_slots < slot_reserve(s) ? slot_reserve(s) - q.num_slots : 0;
}

// Decide which queue pairs may take a slot now.
template <class Env>
BLINK_RARE_FN void offer_slots(Env& env, State& s) {
  uint32_t kept = 0, asking = 0;
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    kept += kept_slots(s, s.qps[qp]);
    asking += s.qps[qp].num_asking > 0;
  }
  kept = env.sum(kept);
  asking = env.sum(asking);
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    QueuePairState& q = s.qps[qp];
    const bool alone = asking == (q.num_asking > 0);
    const bool has_more = s.num_free_slots > kept && (alone || q.num_slots < slot_share(s));
    q.may_take = s.num_free_slots > 0 && (kept_slots(s, q) > 0 || has_more);
  }
  env.sync();
}

// Count who asks for slots in this pass, and make the first offer.
template <class Env>
BLINK_FN void share_slots(Env& env, State& s) {
  uint32_t attached = 0;
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    s.qps[qp].num_asking = 0;
    attached += s.qps[qp].attached != 0;
  }
  attached = env.sum(attached);
  if (env.lane() == 0) s.num_attached = most(1u, attached);
  env.sync();
  for (uint32_t i = env.lane(); i < s.num_waiting; i += env.lanes()) {
    const Sequence& q = s.sequences[s.waiting[i]];
    if (q.slot == kNone && can_start(s, q)) env.fetch_add(s.qps[q.queue_pair].num_asking, 1);
  }
  env.sync();
  offer_slots(env, s);
}

}  // namespace blink
